"""`benchmarks/evidence`: the text is the same for everybody; the study pairs runs, repeats none, resumes the rest."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from benchmarks.evidence import claims, critics, documents, frontier, ladder, power, shift, text
from benchmarks.evidence.study import over_documents
from torch import nn

from cases import small_config
from expert_threshold.data import Batch, Loader
from expert_threshold.model import GPT
from expert_threshold.moe.router import Router
from expert_threshold.optim import Muon
from expert_threshold.routing import ExpertThreshold, TokenChoice
from expert_threshold.runs import RunFolder

BODY = "int f{0}(int a)\n{{\n\treturn a * {0};\n}}\n" * 14
LICENCE = "// SPDX-License-Identifier: GPL-2.0\n/*\n * Copyright * Somebody\n */\n\n"
FILES = {f"kernel/file{i}.c": (LICENCE + BODY.format(i)).encode() for i in range(80)} | {
    "drivers/copy.c": ("/* Another head. */\n" + BODY.format(7)).encode(),
    "include/asm-offsets.h": ("/* DO NOT EDIT. */\n" + BODY.format(101)).encode(),
    "Documentation/example.c": BODY.format(102).encode(),
    "kernel/latin.c": BODY.format(103).encode() + b"// \xe9\n",
    "kernel/short.c": LICENCE.encode() * 9,
    "kernel/notes.txt": BODY.format(104).encode(),
}


SIZES = {"test": 5000, "validation": 5000, "train": 20_000}  # of about 40,000 bytes


def package(path: Path, names: list[str]) -> Path:
    with tarfile.open(path, "w:xz") as archive:
        for name in names:
            member = tarfile.TarInfo(f"linux-source-6.1/{name}")
            member.size = len(FILES[name])
            archive.addfile(member, io.BytesIO(FILES[name]))
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evidence")
    text.build(package(folder / "linux-source-6.1.tar.xz", sorted(FILES)), folder / "out", SIZES, 300)
    return folder / "out"


def test_documents_are_whole_files_without_their_head_each_in_one_part(built: Path) -> None:
    files = {"test": ["test/test.parquet"], "validation": ["text/validation.parquet"]}
    files["train"] = [f"text/train-{shard}.parquet" for shard in range(text.SHARDS)]
    manifest = json.loads((built / "MANIFEST.json").read_text(encoding="utf-8"))
    found: list[dict[str, str]] = []
    for part, names in files.items():
        rows = [row for name in names for row in pyarrow.parquet.read_table(built / name).to_pylist()]
        assert len(rows) == manifest["documents"][part]
        assert sum(len(row["text"]) for row in rows) == manifest["bytes"][part] >= SIZES[part]
        found += rows
    assert len({row["text"] for row in found}) == len(found)
    bodies = {name: BODY.format(i) for i, name in enumerate(f"kernel/file{i}.c" for i in range(80))}
    bodies["drivers/copy.c"] = BODY.format(7)
    assert all(bodies[row["path"]] == row["text"] for row in found)
    assert all(manifest["tokens"][part] > manifest["documents"][part] for part in files)


def test_the_text_depends_neither_on_the_order_of_the_archive_nor_on_the_folder(built: Path, tmp_path: Path) -> None:
    source = package(tmp_path / "linux-source-6.1.tar.xz", sorted(FILES, reverse=True))
    text.build(source, tmp_path / "elsewhere", SIZES, 300)
    both = [json.loads((out / "MANIFEST.json").read_bytes()) for out in (built, tmp_path / "elsewhere")]
    assert both[0].pop("sha256") != both[1].pop("sha256")  # of the archive
    assert both[0] == both[1]
    with pytest.raises(ValueError, match="already exists"):
        text.build(source, tmp_path / "elsewhere", SIZES, 300)
    with pytest.raises(ValueError, match="too short for train"):
        text.build(source, tmp_path / "more", SIZES | {"train": 200_000}, 300)


SMALL = (
    " --eval-tokens 512 --vocab-size 300 --layers 2 --d-model 16 --model.heads 1 --model.kv-heads 1 --model.d-expert 8 "
    "--context 32 --batch-size 2 --log-every 5"
)


def watch(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Batch], Callable[[Loader], Batch]]:
    """Return a list to which every batch that a loader gives is added, and the function that adds it."""
    batches: list[Batch] = []
    following = Loader.__next__

    def watched(loader: Loader) -> Batch:
        batches.append(following(loader))
        return batches[-1]

    monkeypatch.setattr(Loader, "__next__", watched)
    return batches, watched


def study(monkeypatch: pytest.MonkeyPatch, data: Path, out: Path, seeds: int = 2, *more: str) -> list[dict[str, Any]]:
    """Make what is left of the runs, of 12 steps each, and return their records."""
    command = [*f"power --data {data} --out {out} --megatokens 0.000768 --seeds {seeds}".split(), *more]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(power, "SHARED", power.SHARED.replace("--eval-tokens 400000", SMALL))
    threads = torch.get_num_threads()
    try:
        power.main()
    finally:
        torch.set_num_threads(threads)
    return recorded(out)


def recorded(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "records.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_study_pairs_its_runs_repeats_none_and_resumes_an_interrupted_one(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, watched = watch(monkeypatch)
    records = study(monkeypatch, built / "tokens", tmp_path / "whole")
    assert [(r["seed"], r["method"]) for r in records] == [(s, m) for s in (0, 1) for m in (power.FIRST, power.SECOND)]
    weights, tokens = [r["initial_weights"] for r in records], [batch.tokens for batch in batches]
    assert weights[0] == weights[1] != weights[2] == weights[3]
    runs = [torch.stack(tokens[start : start + 12]) for start in range(0, 48, 12)]
    assert len(tokens) == 48
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[2], runs[3])
    assert not torch.equal(runs[0], runs[2])
    assert all(r["late"].keys() == {"8", "9", "10", "11", "12"} and r["load_validation"] >= 1 for r in records)
    assert all(r["late"]["12"] == pytest.approx(r["loss"], abs=1e-3) for r in records)
    (lines,) = (
        RunFolder.open(each).metrics.read() for each in (tmp_path / "whole" / "runs").glob(f"*{power.FIRST}*-0")
    )
    settled = [line["layers"] for line in lines if line["split"] == "train" and line["step"] > 5]  # of 12
    expected = [max(layer["load_spread"] for layer in layers.values()) for layers in settled]
    assert records[0]["load_training"] == pytest.approx(fmean(expected))
    assert study(monkeypatch, built / "tokens", tmp_path / "whole") == records
    assert len(batches) == 48

    def stopped(loader: Loader) -> Batch:
        if len(batches) == 48 + 18:  # in the middle of the second run
            os.kill(os.getpid(), signal.SIGTERM)
        return watched(loader)

    monkeypatch.setattr(Loader, "__next__", stopped)
    with pytest.raises(SystemExit):
        study(monkeypatch, built / "tokens", tmp_path / "interrupted", seeds=1)
    assert len(recorded(tmp_path / "interrupted")) == 1
    again = study(monkeypatch, built / "tokens", tmp_path / "interrupted", seeds=1)
    assert [r["resumed"] for r in again] == [False, True]
    same = ("loss", "late", "averaged", "load_training", "load_validation")
    assert [{name: r[name] for name in same} for r in again] == [{name: r[name] for name in same} for r in records[:2]]


@pytest.mark.parametrize("variant", ["one_start", "one_order"])
def test_seeds_can_share_their_first_weights_or_their_order(
    variant: str, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, _ = watch(monkeypatch)
    first, second = study(monkeypatch, built / "tokens", tmp_path, 2, "--methods", power.FIRST, "--variant", variant)
    assert (first["initial_weights"] == second["initial_weights"]) == (variant == "one_start")
    tokens = torch.stack([batch.tokens for batch in batches])
    assert torch.equal(tokens[:12], tokens[12:]) == (variant == "one_order")


def test_a_frontier_s_setting_is_recorded_once(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--data", str(built / "tokens"), "--out", str(tmp_path), "--tokens", "768", "--only", "dense"]
    monkeypatch.setattr(sys, "argv", ["frontier", *given])
    monkeypatch.setattr(frontier, "SHARED", frontier.SHARED.replace("--eval-tokens 400000", SMALL))
    for _ in range(2):
        frontier.main()
        (record,) = recorded(tmp_path)
        assert (record["family"], record["seed"], record["load_training"]) == ("dense", 0, None)


def records_of(differences: list[float]) -> Iterator[dict[str, Any]]:
    for seed, difference in enumerate(differences):
        for method in (power.FIRST, power.SECOND):
            loss = 2.0 + seed + difference * (method == power.FIRST)
            same = {"initial_weights": str(seed), "corpus": "c", "commit": "d"}
            told = {"variant": "usual", "method": method, "tokens": 1_000_000, "seed": seed}
            yield told | same | {"loss": loss, "late": {"9": loss + 1, "10": loss}, "averaged": loss}


def test_the_scatter_is_that_of_paired_differences_and_unequal_runs_are_no_pair() -> None:
    records = list(records_of([-0.01, 0.0, 0.01, 0.02]))
    assert "| 1M | usual | the end | 4 | +0.0050 | 0.0129 ± 0.0053 | 9 | 1.2" in power.table(records)
    with pytest.raises(ValueError, match="text or commit differ"):
        power.table([records[0] | {"initial_weights": "another"}, *records[1:]])


def test_settings_are_compared_as_if_each_had_every_seed() -> None:
    effects = {"dense": 2.3, "0.01": 2.2, "0.5": 2.1}
    runs = [("dense", "", 0), ("auxiliary loss, softmax", "0.01", 0), ("auxiliary loss, softmax", "0.01", 1)]
    runs += [("expert threshold", "0.5", 1)]
    records = [
        {"family": family, "setting": setting, "tokens": 1, "corpus": "a", "seed": seed}
        | {"loss": effects[setting or family] + 0.1 * seed}
        | dict.fromkeys(("load_training", "load_validation"), None if family == "dense" else 1 + seed)
        for family, setting, seed in runs
    ]
    found = frontier.cells(records)
    assert [(cell.family, cell.seeds, cell.load_training) for cell in found] == [
        ("dense", 1, None),
        ("auxiliary loss, softmax", 2, 1.5),
        ("expert threshold", 1, 2),
    ]
    assert [cell.loss for cell in found] == pytest.approx([2.35, 2.25, 2.15])  # at the mean of both seeds
    assert found[1].error == pytest.approx(frontier.SCATTER / 2**0.5)  # its mean is over both seeds
    assert [found[0].error, found[2].error] == pytest.approx([frontier.SCATTER * 1.5**0.5] * 2)
    assert "| dense |  | 1 |" in frontier.table(found)
    with pytest.raises(ValueError, match="differ"):
        frontier.cells([*records, records[0] | {"tokens": 2}])


def test_only_a_measured_difference_or_equivalence_confirms_a_claim() -> None:
    verdicts = ("higher", "equivalent", "open", "lower")
    assert [claims.verdict(0.05, each) for each in verdicts] == ["holds", "fails", "open", "fails"]
    assert [claims.verdict(0.0, each) for each in verdicts] == ["fails", "holds", "open", "fails"]


def test_the_page_shows_its_tables_as_the_records_give_them() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "evidence.md").read_text(encoding="utf-8")
    assert claims.table() in page
    asked = critics.read(docs / "results" / "evidence" / "critics.jsonl")
    assert all(table(asked) in page for table in (critics.differences, critics.rates, critics.recovery))
    assert shift.table(critics.read(docs / "results" / "evidence" / "shift.jsonl")) in page
    records = docs / "results" / "evidence" / "ladder"
    validation, test, others = (ladder.read(records / f"{name}.jsonl") for name in ("records", "test", "rates"))
    assert all(table in page for table in (ladder.rivals(validation), ladder.rivals(test)))
    assert ladder.rates(others, validation) in page
    assert ladder.growth(ladder.read_growth(records)) in page


def test_a_gap_is_predicted_by_its_law_without_a_look_at_the_rung_itself() -> None:
    runs = [
        {"method": method, "width": width, "tokens": tokens, "seed": 0, "corpus": "c"}
        for method in ("dense", "expert threshold")
        for width in (64, 128)
        for tokens in (2_000_000, 4_000_000, 8_000_000)
    ]
    laws = {(64, 2e6): 0.01, (64, 4e6): 0.0, (64, 8e6): -0.01, (128, 2e6): 0.03, (128, 4e6): 0.02, (128, 8e6): 9.0}
    for run in runs:
        run["loss"] = 2.0 + (run["method"] != "dense") * laws[run["width"], run["tokens"]]
    found = ladder.predict(runs, (128, 8_000_000), 1)
    assert found["gap"]["expert threshold"] == pytest.approx([0.01] * 3, abs=1e-6)
    assert found["coefficients"]["expert threshold"]["a"] == pytest.approx([-0.01] * 3, abs=1e-6)
    with pytest.raises(ValueError, match="too few"):
        ladder.predict([run for run in runs if run["width"] == 64], (64, 8_000_000), 1)


def runs_of(effects: Sequence[float], noise: float) -> list[dict[str, Any]]:
    random = np.random.default_rng(1)
    return [
        {"method": method, "width": width, "tokens": tokens * 1_000_000, "seed": seed, "corpus": "c"}
        | {"loss": 2.0 if method == "dense" else 2.0 - 0.01 * tokens.bit_length() + effect + random.normal(0, noise)}
        for seed, effect in enumerate(effects)
        for width in (64, 128)
        for tokens in (2, 4, 8)
        for method in ("dense", "expert threshold")
    ]


def gaps_of(effects: Sequence[float], noise: float) -> ladder.Gaps:
    return ladder.Gaps(runs_of(effects, noise), "expert threshold")


def test_growth_within_seeds_ignores_their_levels_but_not_that_their_slopes_differ() -> None:
    runs = runs_of([0.0, 0.03, 0.0], 1e-9)
    for run in runs:  # the last seed's gaps do not change, the others' by -0.01 per doubling
        run["loss"] = 2.0 if run["seed"] == 2 else run["loss"]
    short = [run | {"seed": 3} for run in runs if run["seed"] == 0 and run["tokens"] == 2_000_000]
    table = ladder.growth({"validation": (runs + short, [])})
    assert "| per doubling within seeds, all widths | -0.0067 (-0.0210 to +0.0077; 3) |" in table


def half_widths(gaps: ladder.Gaps, pairs: int) -> list[float]:
    """Half the 95 % intervals of g₀ and a, and of the mean gap of new pairs on a rung in the middle."""
    coefficients, new = gaps.bootstrap((64, 4_000_000), pairs)
    ends = [ladder.interval(samples)[1:] for samples in (*coefficients.T[:2], new)]
    return [(high - low) / 2 for low, high in ends]


@pytest.mark.parametrize("noise", [1e-4, 0.01])
def test_an_effect_of_seeds_widens_the_level_of_a_gap_but_not_its_slopes(noise: float) -> None:
    effects = [-0.03, -0.01, 0.0, 0.0, 0.01, 0.03]
    t = 2.571 * np.std(effects, ddof=1)  # of 5 degrees of freedom
    gaps = gaps_of(effects, noise)
    level, slope, new = half_widths(gaps, 1)
    assert (level, new) == (pytest.approx(t / 6**0.5, rel=0.2), pytest.approx(t * (1 + 1 / 6) ** 0.5, rel=0.25))
    assert slope < 0.5 * max(noise, 1e-3)
    assert half_widths(gaps, 4)[2] == pytest.approx(t * (1 / 4 + 1 / 6) ** 0.5, rel=0.25)


@pytest.mark.parametrize("seeds", [1, 2, 6])
def test_noise_alone_is_no_effect_of_seeds_and_its_intervals_are_students(seeds: int) -> None:
    gaps = gaps_of([0.0] * seeds, 0.01)
    points = [(*gaps.row(rung), seed, gap) for rung, seed, gap in gaps.pairs]
    *rows, member, found = map(np.array, zip(*points, strict=True))
    design = np.column_stack([*rows, *(member == seed for seed in range(seeds))])
    inverse, free = np.linalg.pinv(design), 5 * seeds - 2
    error = np.linalg.norm(found - design @ inverse @ found) / free**0.5
    t = error * {3: 3.182, 8: 2.306, 28: 2.048}[free]
    level, slope, _ = half_widths(gaps, 1)
    assert slope == pytest.approx(t * np.linalg.norm(inverse[0]), rel=0.15)
    assert level == pytest.approx(t * np.linalg.norm(inverse[2:].mean(0)), rel=0.25)


def test_rivals_are_compared_over_seeds_not_over_runs() -> None:
    runs = [
        {"method": method, "width": 64, "tokens": tokens, "seed": seed, "corpus": "c", "loss": 2.0 - gain}
        for seed, gains in enumerate(((0.01, 0.03), (0.04, 0.06), (0.02, 0.02)))
        for tokens, gain in zip((2_000_000, 4_000_000), gains, strict=True)
        for method, gain in (("expert threshold", gain), ("token choice", 0.0))
    ]
    assert "| token choice | 6 | 3 | -0.0300 | -0.0730 to +0.0130 | open | open |" in ladder.rivals(runs)


def test_muon_in_blocks_updates_a_dense_layer_like_a_stack_of_two_experts() -> None:
    torch.manual_seed(0)
    weights, grads = ([torch.randn(shape) for shape in ((16, 4), (4, 16))] for _ in range(2))
    options: dict[str, Any] = {"normuon": "longer", "equilibrate": "rows", "ns_dtype": torch.float32}
    for weight, grad in zip(weights, grads, strict=True):
        dense, stack = (nn.Parameter(each.clone()) for each in (weight, critics.blocks_of(weight, 8).contiguous()))
        dense.grad, stack.grad = grad, critics.blocks_of(grad, 8).contiguous()
        for _ in range(2):
            with critics.muon_in_blocks(8):
                Muon([dense], **options).step()
            Muon([stack], **options).step()
        torch.testing.assert_close(critics.blocks_of(dense.detach(), 8), stack.detach())
        assert not torch.equal(dense, weight)


def test_a_starved_expert_gets_lower_scores_after_so_many_updates() -> None:
    router, x = Router(4, TokenChoice(3, 1)), torch.randn(1, 8, 4)
    before = router.score(x)
    with critics.starved(after=1):
        assert torch.equal(router.score(x), before)
        router.update(router(x).observation)
        torch.testing.assert_close(router.score(x), before - torch.tensor([critics.HANDICAP, 0, 0]))
    assert torch.equal(router.score(x), before)


def test_intervals_cover_documents_and_pairs_alone_and_together() -> None:
    targets = np.array([10, 20, 30, 40])
    same = documents.compare(-0.01 * np.stack([targets] * 5), targets)
    assert same["difference"] == -0.01
    assert same["over_documents"] == same["over_both"] == [-0.01, -0.01]
    pairs = documents.compare(np.array([[-0.01], [-0.03]] * 3) * targets, targets)
    assert pairs["over_documents"] == pytest.approx([-0.02, -0.02])
    assert pairs["over_both"] == pytest.approx([-0.0315, -0.0085], abs=2.5e-3)  # by Student's t, ± 0.0115
    texts = documents.compare(np.array([[0.1, 0.0, 0.0, -0.1]] * 5), targets)
    assert texts["over_both"][0] < 0 < texts["over_both"][1]
    assert texts["pairs"][0] == {"difference": 0.0, "over_documents": texts["over_documents"]}
    one = documents.compare(np.array([[0.1, 0.0, 0.0, -0.1]]), targets)
    assert one["over_both"] == one["over_documents"]


def test_the_error_of_a_change_in_loss_is_that_of_whole_documents() -> None:
    tokens = torch.tensor([9, 1, 9, 2])  # two documents
    mean, error = over_documents(torch.tensor([1.0, 1.0, 3.0, 3.0], dtype=torch.float64), tokens, 9)
    assert (mean, error) == (2, pytest.approx(8**0.5 / 4))


def test_running_cutoffs_are_updated_after_each_batch_and_frozen_ones_never() -> None:
    torch.manual_seed(0)
    rule = ExpertThreshold(4, 1, decay=0.0, warmup_steps=0)
    model = GPT(small_config(rule, layers=2)).eval()
    batch = torch.randint(64, (2, 2, 16))
    once = shift.measure(model, [tuple(batch)], running=False)
    assert shift.measure(model, [tuple(batch)] * 2, running=False) == pytest.approx(once)
    again = shift.measure(model, [tuple(batch)] * 2, running=True)
    k = 32 * 1 // 4  # the second batch's cutoffs are its own k-th largest scores, which do not exceed themselves
    assert again["fanout"] == pytest.approx((once["fanout"] + 4 * (k - 1) / 32) / 2)

"""`et compare`: runs that differ only in the method, a table of what they measured, and interruptions."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.text import Text

from cases import et, said
from commands import CLOCKS, Experiment, Options, Refused, edit, lines, put, read, without, write_lines
from expert_threshold import __version__
from expert_threshold.analysis.figures.learning import draw_losses
from expert_threshold.analysis.figures.style import MUTED
from expert_threshold.analysis.methods import find_runs
from expert_threshold.analysis.records import Result, read_run
from expert_threshold.analysis.results import names_with_sizes
from expert_threshold.cli.compare import configure
from expert_threshold.compare import running
from expert_threshold.compare.experiment import run_title
from expert_threshold.compare.judgement import Judged
from expert_threshold.compare.page import VERDICTS, curves, draw_differences
from expert_threshold.compare.paired import Difference, Verdict
from expert_threshold.recipes import methods
from expert_threshold.routing import PAPER_STEPS, ExpertChoice, ExpertThreshold, TokenChoice
from expert_threshold.runs import RunFolder

CHOSEN = ["dense", "token_choice", "expert_threshold"]
STEPS = 4


def record_of(out: Path) -> Any:
    return read(out / "compare.json")


@pytest.fixture(scope="session")
def small(small: Options) -> Options:
    return [*small, "--steps", STEPS, "--num-experts", 4]


@pytest.fixture
def finished(comparison: Experiment) -> Path:
    return comparison.out


@pytest.fixture
def copy(comparison: Experiment, tmp_path: Path) -> Path:
    return comparison.copy(tmp_path / "copy").out


@pytest.fixture
def again(comparison: Experiment, copy: Path) -> Options:
    """The command that made the comparison, applied to a copy."""
    return comparison._replace(out=copy).command


def test_the_table_says_what_the_runs_measured(finished: Path) -> None:
    table = {row["method"]: row for row in record_of(finished)["table"]}
    assert list(table) == CHOSEN
    for method, row in table.items():
        last, speeds, trained = [], [], []
        for seed in range(2):
            records = RunFolder.open(finished / method / f"seed_{seed}").metrics.read()
            last.append(next(r for r in records if r["split"] == "validation" and r["step"] == STEPS))
            warm = [r["layers"].values() for r in records if r["split"] == "train" and r["step"] > STEPS / 4]
            trained += [max((layer["load_spread"] for layer in layers), default=0.0) for layers in warm]
            speeds.append(statistics.median(r["tokens_per_second"] for r in records if r["split"] == "train"))
        assert row["seeds"] == 2
        assert row["loss"] == pytest.approx(statistics.mean(r["loss"] for r in last))
        assert row["loss_std"] == pytest.approx(abs(last[0]["loss"] - last[1]["loss"]) / math.sqrt(2))
        assert row["bits_per_byte"] == pytest.approx(statistics.mean(r["bits_per_byte"] for r in last))
        assert row["tokens_per_second"] == pytest.approx(statistics.mean(speeds))
        if method == "dense":
            assert row["load_spread"] is row["fanout_mean"] is row["fanout_std"] is None
            continue
        worst = [max(layer["load_spread"] for layer in r["layers"].values()) for r in last]
        assert row["load_spread"] == pytest.approx(statistics.mean(worst))
        assert row["load_spread_trained"] == pytest.approx(statistics.mean(trained))
        fanouts = [
            np.concatenate([np.repeat(np.arange(5), layer["fanout_counts"]) for layer in r["layers"].values()])
            for r in last
        ]
        assert all(len(r["layers"]) == 2 for r in last)
        assert row["fanout_mean"] == pytest.approx(np.mean([f.mean() for f in fanouts]))
        assert row["fanout_std"] == pytest.approx(np.mean([f.std() for f in fanouts]), abs=1e-9)
    assert table["token_choice"]["fanout_mean"] == 1
    assert table["token_choice"]["fanout_std"] == 0


def test_csv_json_and_markdown_agree(finished: Path) -> None:
    table = record_of(finished)["table"]
    with (finished / "compare.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [{k: v or None for k, v in line.items()} for line in lines] == [
        {k: None if v is None else str(v) for k, v in row.items()} for row in table
    ]
    markdown = (finished / "compare.md").read_text()
    for row in table:
        line, *_ = [line for line in markdown.splitlines() if line.startswith(f"| {row['method']} |")]
        assert f"{row['loss']:.3f} ± {row['loss_std']:.3f}" in line
        assert f"{row['tokens_per_second']:,.0f}" in line
    assert markdown.count("**") == 4  # the best loss and the best bits per byte


def test_the_record_tells_the_machine_the_baseline_and_every_run(finished: Path) -> None:
    record = record_of(finished)
    machine = RunFolder.open(finished / "dense" / "seed_0").section("machine")
    assert machine["threads"] == 1
    assert record["headline"].startswith("tiny on corpus.jsonl: 4 steps of 64 tokens = 256 tokens; ")
    assert f"{machine['cpu']}, threads: 1, torch {torch.__version__}" in record["headline"]
    assert [(r["method"], r["seed"]) for r in record["runs"]] == [(m, s) for m in CHOSEN for s in range(2)]
    for run in record["runs"]:
        assert [tokens for tokens, _ in run["curve"]] == [2 * 2 * 32, 4 * 2 * 32]
        assert run["curve"][-1][1] == run["loss"]
    loss = {row["method"]: row["loss"] for row in record["table"]}
    difference = {row["method"]: row["difference"] for row in record["judgement"]}
    assert record["baseline"] == "token_choice"
    assert difference["token_choice"] is None
    assert difference["dense"]["mean"] == pytest.approx(loss["dense"] - loss["token_choice"])


def test_a_page_with_every_method_and_figures_are_drawn(finished: Path) -> None:
    assert (finished / "loss_by_method.png").read_bytes().startswith(b"\x89PNG")
    svg = (finished / "loss_by_method.svg").read_text()
    assert all(f">{method}" in svg for method in CHOSEN)
    assert (finished / "differences.svg").read_text().count(">expert_threshold<") == 1
    page = (finished / "compare.html").read_text()
    assert page.count("<table>") == 4  # results, judgement, loads, options that differ
    assert page.count("<th scope") == page.count('<th scope="col"><button>')
    assert all(page.count(f"<td>{method}</td>") >= 3 for method in CHOSEN)


def judged(method: str, mean: float, half: float, verdict: Verdict = "open") -> Judged:
    difference = Difference(mean, mean - half, mean + half, verdict)
    return Judged(method, 3, difference, None, None, 1.0, None, None)


def test_an_outlier_does_not_flatten_the_figure_of_differences() -> None:
    close, wide = judged("close", 0.01, 0.02), judged("wide", 0.02, 0.9)
    also, far = judged("also", -0.01, 0.03), judged("far", 0.7, 3.0)
    axes = draw_differences([close, wide, also, far], "base", 0.01).axes[0]
    assert axes.get_xlim()[1] == pytest.approx(1.05 * 3 * (0.04 + 0.92) / 2)  # that of most
    near = draw_differences([close, also, also, far], "base", 0.01).axes[0]
    assert near.get_xlim()[1] == pytest.approx(1.05 * 3 * 0.04)
    assert [text.get_text() for text in near.texts] == ["+0.700 ± 3.000"]
    cut = draw_differences([close, also, also, wide], "base", 0.01).axes[0]
    arrows = {line.get_marker(): line.get_xdata() for line in cut.lines if line.get_marker() in ("<", ">")}
    assert arrows == {"<": [-cut.get_xlim()[1]], ">": [cut.get_xlim()[1]]}  # of "wide", which extends beyond them
    assert [line.get_xdata() for line in near.lines if line.get_marker() in ("<", ">")] == [[-near.get_xlim()[1]]]
    diverged = Judged("diverged", 3, None, None, None, None, None, None)
    axes = draw_differences([diverged, close], "base", 0.01).axes[0]
    assert axes.get_xlabel().startswith("validation loss minus base")


def test_the_figure_of_differences_tells_verdicts_by_colour() -> None:
    verdicts: list[Verdict] = ["lower", "equivalent", "open", "higher", "higher"]
    rows = [judged(f"method {place}", place, 0.5, verdict) for place, verdict in enumerate(verdicts)]
    figure = draw_differences(rows, "base", 0.01)
    means = [line.get_color() for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert means == [VERDICTS[verdict] for verdict in verdicts]
    assert len(set(means)) == 4
    key, some = (draw_differences(shown, "base", 0.01).legends[0].get_texts() for shown in (rows, rows[3:]))
    assert [text.get_text() for text in key] == ["lower", "equivalent", "open", "higher"]
    assert [text.get_text() for text in some] == ["higher"]


def test_of_many_methods_the_paper_s_and_the_lowest_are_named() -> None:
    of_paper = [entry("expert_threshold", 9.0), entry("dense", 8.0)]
    others = [entry(f"method {place}", 1.0 + place / 10) for place in range(11)]
    few = draw_losses({"methods": [*others[:10], *of_paper]})
    assert "other" not in "".join(text.get_text() for text in few.findobj(Text))
    many = draw_losses({"methods": [*reversed(others), *of_paper]})
    texts = [text.get_text() for text in many.findobj(Text)]
    named = {f"method {place}  {1 + place / 10:.3f}" for place in range(4)}
    assert {text for text in texts if "  " in text} == named | {"expert_threshold  9.000", "dense  8.000"}
    assert "7 others" in texts
    grey = [line for line in many.axes[0].lines if line.get_color() == MUTED]
    assert [line.get_ydata()[-1] for line in grey] == pytest.approx([2.0, 1.9, 1.8, 1.7, 1.6, 1.5, 1.4])


def test_methods_without_a_last_loss_are_drawn_among_many() -> None:
    """Regression: a diverged run ended a finished comparison with a traceback before its page was written."""
    lost = [entry("diverged", 1.0), entry("never validated", 1.0)]
    lost[0]["points"][-1][1] = None
    lost[1]["points"] = []
    for count in (3, 13):
        others = [entry(f"method {place}", 2.0) for place in range(count)]
        figure = draw_losses({"methods": [*lost, *others, entry("dense", 3.0)]})
        assert len(figure.axes[0].lines) == count + 3
    others[-1]["points"] = [[1, 10.0], [9, 2.0]]
    assert draw_losses({"methods": [*lost, *others]}).axes[0].get_xlim()[1] > 9  # of a grey one, too


def entry(method: str, loss: float) -> dict[str, Any]:
    return {"method": method, "kind": method, "points": [[1, 10.0], [2, loss + 0.1], [3, loss]]}


def test_each_run_is_one_that_et_train_would_have_made(finished: Path, small: Options, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    assert et("train", *small, "--rule", "token_choice", "--seed", 1, "--out", alone) == 0
    run, other = RunFolder.open(finished / "token_choice" / "seed_1"), RunFolder.open(alone)
    assert without(run.metrics.read(), CLOCKS) == without(other.metrics.read(), CLOCKS)
    assert run.config == other.config


def swept(folder: Path, **options: dict[str, Any]) -> Path:
    """Return a folder with the best options of methods, as a sweep writes them."""
    for method, sections in options.items():
        (folder / method).mkdir(parents=True)
        rule = {"name": methods()[method].rule or "dense"}
        (folder / method / "best.json").write_text(json.dumps({**sections, "rule": rule}))
    return folder


def test_tuned_options_are_recorded_and_kept_apart(small: Options, refused: Refused, tmp_path: Path) -> None:
    both = ["compare", *small, "--rules", "dense,expert_threshold"]
    slow = swept(tmp_path / "slow", dense={}, expert_threshold={"optim": {"matrix_lr": 0.01}})
    fast = swept(tmp_path / "fast", dense={}, expert_threshold={"optim": {"matrix_lr": 0.1}})
    narrow = swept(tmp_path / "narrow", expert_threshold={"model": {"d_expert": 32}})
    longer = swept(tmp_path / "longer", dense={}, expert_threshold={"train": {"accumulation": 2}})
    one, other, thin, joined = (tmp_path / name for name in ("one", "other", "thin", "joined"))
    assert et(*both, "--tuned", slow, "--out", one) == 0
    assert et(*both, "--tuned", fast, "--out", other) == 0
    # A comparison cannot be continued with other options, and runs with other options are not seeds of one method.
    refused([*both, "--tuned", longer, "--out", one], "--tuned: expert_threshold has train.accumulation=2 but dense")
    refused([*both, "--tuned", fast, "--seeds", 2, "--out", one], "matrix_lr=0.1 differs from 0.01")
    join = ["compare", "--join", one, "--join", other, "--out", joined]
    refused(join, f"--join {other}: expert_threshold has optim.matrix_lr=0.1 there and 0.01 in {one}")
    # The same options continue it, also with only some of its methods; methods of other sizes get their own name.
    assert et("compare", *small, "--rules", "expert_threshold", "--tuned", fast, "--out", other) == 0
    assert [run["method"] for run in record_of(other)["runs"]] == ["dense", "expert_threshold"]
    assert et("compare", *small, "--rules", "expert_threshold", "--tuned", narrow, "--out", thin) == 0
    assert et("compare", "--join", one, "--join", thin, "--out", joined) == 0
    rows = read(joined / "joined.json")["table"]
    assert [row["method"] for row in rows] == ["dense", "expert_threshold", "expert_threshold (4 experts of 32)"]


def test_a_diverged_method_has_no_loss_and_ends_nothing(
    small: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steep = {"optim": {"matrix_lr": 1e29, "head_lr": 1e29}}
    folder, out = swept(tmp_path / "swept", token_choice=steep, expert_threshold={}), tmp_path / "out"
    chosen = ["--rules", "token_choice,expert_threshold", "--tuned", folder, "--out", out]
    command = ["compare", *small, *chosen, "--steps", 14, "--eval-every", 14, "--model.z-loss", 0.001]
    assert "token_choice seed 0 diverged" in said(*command)
    record = record_of(out)
    lost, kept = record["table"]
    assert (lost["method"], lost["loss"], lost["loss_std"]) == ("token_choice", None, None)
    assert kept["loss"] is not None
    assert kept["loss_std"] is None  # of one run
    (_, judged) = record["judgement"]
    assert judged["difference"] is judged["at_flops"] is judged["at_seconds"] is None
    markdown = (out / "compare.md").read_text()
    assert re.search(r"^\| token_choice \|.* – ", markdown, re.MULTILINE)
    assert f"**{kept['loss']:.3f}" in markdown  # the best
    assert (out / "compare.html").is_file()
    monkeypatch.setattr(running, "train_run", None)
    assert et(*command) == 0
    assert record_of(out) == record


def test_a_killed_run_resumes_from_its_checkpoint_or_starts_over(again: Options, finished: Path, copy: Path) -> None:
    """One run was killed after step 2, one before its first checkpoint, one before anything was written."""
    shutil.rmtree(copy / "dense" / "seed_1" / "checkpoints" / "step_000004")
    shutil.rmtree(copy / "token_choice" / "seed_0" / "checkpoints")
    for path in (copy / "expert_threshold" / "seed_0").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (copy / "expert_threshold" / "seed_0" / ".lock").write_text("process 1 on elsewhere")
    assert et(*again) == 0
    assert without(record_of(copy), CLOCKS) == without(record_of(finished), CLOCKS)


def test_methods_and_seeds_can_be_added_later(small: Options, copy: Path) -> None:
    before = {path: path.read_bytes() for path in copy.glob("*/seed_*/**/*") if path.is_file()}
    assert et("compare", *small, "--rules", "token_choice_aux,dense", "--seeds", 3, "--out", copy) == 0
    assert all(path.read_bytes() == content for path, content in before.items())
    seeds = {row["method"]: row["seeds"] for row in record_of(copy)["table"]}
    assert seeds == {"dense": 3, "token_choice": 2, "expert_threshold": 2, "token_choice_aux": 3}


def test_progress_names_run_step_and_time_left(
    small: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert et("compare", *small, "--rules", "dense,token_choice", "--seeds", 2, "--out", tmp_path / "out") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = [line for line in shown.out.splitlines() if "  step 4/4  loss" in line]
    assert [line.split(" (")[0] for line in lines] == [
        "1/4 dense seed 0",
        "2/4 token_choice seed 0",
        "3/4 dense seed 1",
        "4/4 token_choice seed 1",
    ]
    for line in lines:
        assert " left in all)  step 4/4  loss " in line
        assert line.endswith("  0:00 left")
    assert "methods × seeds: 2 × 2 = 4 runs" in shown.out


def test_the_total_time_left_covers_this_run_and_those_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("expert_threshold.compare.experiment.time.monotonic", lambda: now)
    first = run_title("1/3", now, [], later=2)
    last = run_title("3/3", now, [90.0, 110.0], later=0)
    second = run_title("2/3", now, [90.0], later=1)
    now += 20
    assert first(40.0) == "1/3 (2:40 left in all)"
    assert second(70.0) == "2/3 (2:40 left in all)"
    assert last(40.0) == "3/3 (0:40 left in all)"
    assert first(None) == "1/3"


def test_a_text_that_changes_between_two_runs_changes_none_of_them_and_is_refused_later(
    small: Options, refused: Refused, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing, train_run, out = tmp_path / "corpus.jsonl", running.train_run, tmp_path / "out"
    shutil.copy(text, changing)

    def train_and_change(*arguments: Any, **options: Any) -> Any:
        result = train_run(*arguments, **options)
        changing.write_text("".join(text.read_text().splitlines(keepends=True)[::2]))
        return result

    monkeypatch.setattr(running, "train_run", train_and_change)
    command = ["compare", *small, "--data", changing, "--rules", "dense,token_choice", "--out", out]
    assert et(*command) == 0
    assert len({run.config["corpus"]["hash"] for run in find_runs([str(out)])}) == 1
    refused([*command, "--seeds", 2], f"et compare: {changing} has changed")


def test_the_work_ahead_is_announced_before_the_text_is_read(
    small: Options, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that holds only a stale lock may become a comparison; a failed command leaves it empty."""
    config, out = finished / "dense" / "seed_0" / "config.json", tmp_path / "out"
    out.mkdir()
    (out / ".lock").write_text("process 1 on elsewhere")
    for given, start in (
        (small, "tiny"),
        (["--config", config], config),
        (["d4", "--config", config], f"d4 with {config}"),
    ):
        assert et("compare", *given, "--data", tmp_path / "missing.txt", "--out", out) == 2
        shown = capsys.readouterr()
        assert shown.out.startswith(f"{start} on missing.txt: 4 steps of 64 tokens = 256 tokens; ")
        assert "methods × seeds: 8 × 1 = 8 runs" in shown.out
        assert "missing.txt does not exist" in shown.err
    assert list(tmp_path.rglob("*")) == [out]


METRICS = "token_choice/seed_1/metrics.jsonl"
AGAIN = [METRICS.partition("/metrics")[0], "restore it from a backup", "to train that run again"]
DAMAGE: list[tuple[str, Any, list[str]]] = [
    *(
        (METRICS, change, AGAIN)
        for change in (
            ("layers", ...), ("layers", "x"), ("layers.1", 5), ("layers.1.fanout_counts", ...),
            ("layers.1.fanout_counts", [1, 2]), ("loss", ...), ("loss", "x"), ("bits_per_byte", []),
            ("layers.2.load_spread", "x"),
        )
    ),
    *(
        ("dense/seed_0/config.json", data, ["config.json"])
        for data in (b"{}", b"\xff", b'{"format": "expert-threshold run"}', ("machine", ...), ("corpus", [5]))
    ),
    ("dense/seed_0/metrics.jsonl", b'{"step": 1}\n{}\n', ["metrics.jsonl"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "parts"), DAMAGE)
def test_a_damaged_file_is_named_and_nothing_is_changed(
    name: str, damage: Any, parts: list[str], again: Options, copy: Path, refused: Refused
) -> None:
    """damage: the file's content, or a value to set in its last record."""
    path = copy / name
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    elif name.endswith(".json"):
        with edit(path) as record:
            put(record, *damage)
    else:
        records = lines(path)
        put(records[-1], *damage)
        write_lines(path, records)
    refused(again, *parts)


def test_a_layer_that_got_no_token_in_validation_has_no_spread(copy: Path) -> None:
    path = copy / "token_choice" / "seed_0" / "metrics.jsonl"
    records = lines(path)
    other = records[-1]["layers"]["2"]["load_spread"]
    records[-1]["layers"]["1"]["load_spread"] = None
    write_lines(path, records)
    result = read_run(RunFolder.open(path.parent)).result
    assert result.load_spread == other


TWO: dict[str, Any] = {"rule.experts_per_token": 2}


def test_each_method_is_what_its_name_says() -> None:
    rules = {name: config.model.rule for name, config in configure(TWO | {"preset": "tiny"}, list(methods())).items()}
    assert rules["dense"] is None
    for end, balance in (("", "none"), ("_aux", "aux"), ("_loss_free", "loss_free")):
        assert rules[f"token_choice{end}"] == TokenChoice(16, 2, balance=balance)
    for pool in ("sequence", "batch"):
        assert rules[f"expert_choice_{pool}"] == ExpertChoice(16, 2, pool=pool, decay=0.9)
    warm, cold = rules["expert_threshold"], rules["expert_threshold_no_warmup"]
    assert (warm.warmup_steps, cold.warmup_steps) == (20, 0)
    assert warm.decay == cold.decay < ExpertThreshold().decay


@pytest.mark.parametrize(("preset", "steps"), [("tiny", 100), ("quickstart", PAPER_STEPS)])
def test_the_kin_of_expert_threshold_differ_in_the_cutoff_and_the_bounds_alone(preset: str, steps: int) -> None:
    kin = [f"expert_threshold_{name}" for name in ("last_batch", "mean", "trend")]
    bounded = [config.model.rule for config in configure({"preset": preset, "train.steps": steps}, kin).values()]
    free = configure({"preset": preset, "train.steps": steps}, [f"{name}_unbounded" for name in kin]).values()
    last, mean, trend = bounded
    assert [config.model.rule for config in free] == [replace(rule, capacity_slack=None) for rule in bounded]
    assert last == replace(mean, decay=0)
    assert trend == replace(mean, estimator="trend", decay=trend.decay)
    assert 0 < trend.decay < mean.decay


def test_all_methods_are_trained_alike() -> None:
    configs = configure(TWO | {"preset": "quickstart"}, list(methods())).values()
    alike = [(config.model.to_dict() | {"rule": None}, config.data, config.optim, config.train) for config in configs]
    assert all(other == alike[0] for other in alike)


def test_an_option_of_rules_reaches_every_method_that_leaves_it_open() -> None:
    given = TWO | {"preset": "tiny", "rule.num_experts": 8, "rule.warmup_steps": 7, "rule.decay": 0.5}
    for name, config in configure(given, list(methods())).items():
        rule = config.model.rule
        assert (rule is None) == (name == "dense")
        assert rule is None or rule.num_experts == 8
        if isinstance(rule, ExpertThreshold):
            assert rule.warmup_steps == (0 if name == "expert_threshold_no_warmup" else 7)
        if isinstance(rule, ExpertChoice | ExpertThreshold):
            assert rule.decay == (0 if "last_batch" in name else 0.5)


def result(seed: int, loss: float | None, curve: list[tuple[int, float | None]]) -> Result:
    clock = [tokens * (1.0 + seed) for tokens, _ in curve]
    return Result("dense", seed, loss, loss, 100.0, None, None, None, curve, clock, 1.0, None, None, None, None)


def test_a_curve_is_the_mean_over_seeds_where_all_were_validated() -> None:
    runs = [
        result(0, 1.0, [(5, 9.0), (10, 3.0), (20, 1.0)]),  # validated at 5 too
        result(1, 2.0, [(10, 5.0), (20, None)]),
    ]
    assert [entry["points"] for entry in curves(runs)["methods"]] == [[(10, 4.0), (20, None)]]
    assert [entry["points"] for entry in curves(runs, by_seconds=True)["methods"]] == [[(15.0, 4.0), (30.0, None)]]


def test_flops_follow_the_fanout_of_each_step(copy: Path) -> None:
    """The fanout drifts: the last two of four steps use twice as many experts, with the same mean."""
    run = RunFolder.open(copy / "expert_threshold" / "seed_0")
    records = run.metrics.read()
    for record in records:
        for layer in record["layers"].values() if record["split"] == "train" else ():
            layer["fanout_mean"] = 1.0 if record["step"] <= 2 else 3.0
    write_lines(run.path / "metrics.jsonl", records)
    drifting = read_run(run).result
    even = read_run(RunFolder.open(copy / "token_choice" / "seed_0")).result
    dense = read_run(RunFolder.open(copy / "dense" / "seed_0")).result
    assert (drifting.fanout_trained, even.fanout_trained, dense.fanout_trained) == (2, 1, None)
    assert drifting.flops[0] == even.flops[0]
    assert even.flops[1] == 2 * even.flops[0]
    experts = 2 * (3 - 1) * 2 * 2 * 32  # layers, more experts, steps, tokens
    more = experts * 6 * 2 * 32 * run.config["model"]["d_expert"]
    assert drifting.flops[1] - even.flops[1] == pytest.approx(more, rel=0.01)


def test_comparisons_join_into_one_table(
    small: Options, finished: Path, refused: Refused, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, out = tmp_path / "elsewhere", tmp_path / "joined"
    assert et("compare", *small, "--rules", "token_choice_aux", "--seeds", 2, "--out", other) == 0
    join = ["compare", "--join", finished]
    options = ["--baseline", "dense", "--margin", 0.5, "--out", out]
    for _ in range(2):  # the second time in its own folder
        capsys.readouterr()
        shown = said(*join, "--join", other, *options)
    record = read(out / "joined.json")
    assert [row["method"] for row in record["judgement"]] == [*CHOSEN, "token_choice_aux"]
    assert record["baseline"] == "dense"
    assert all(row["seconds"] is not None for row in record["judgement"])  # one machine
    assert "token_choice_aux" in (out / "compare.html").read_text()
    for method in CHOSEN:
        assert sum(line.lstrip().startswith(f"{method} ") for line in shown.splitlines()) == 3
    assert "…" not in shown
    assert "joined.json" in shown
    refused([*join, "--join", finished, *options], "include the same folder twice")
    refused(["compare", "--join", tmp_path / "none", *options], "has no finished run")
    refused([*join, "--steps", 8, *options], "leave out --steps")
    refused([*join, "quickstart", "--out", out], "leave out quickstart")
    refused([*join, "--out", other], "is not a joined comparison")
    refused([*join, "--baseline", "relu", "--out", out], "--baseline relu")


@pytest.fixture
def join(finished: Path, copy: Path, tmp_path: Path) -> Options:
    """The command that joins the comparison with its copy."""
    return ["compare", "--join", finished, "--join", copy, "--out", tmp_path / "out"]


def change(folder: Path, changes: dict[str, Any], but: str = "", seeds: int = 0) -> None:
    """Change config.json of all runs except those of the method `but`. seeds: a number to add to the seeds."""
    for file in sorted(folder.glob("*/seed_*/config.json"), reverse=True):
        if file.parents[1].name != but:
            with edit(file) as config:
                for path, value in changes.items():
                    put(config, path, value)
                config["train"]["seed"] += seeds
        if seeds:
            file.parent.rename(file.parents[1] / f"seed_{int(file.parent.name[5:]) + seeds}")


SIZES = {
    "rule.num_experts": 64, "model.d_expert": 8, "model.shared_experts": 4, "model.gate_norm": "fanout",
    "optim.expert_lr": 0.01, "versions.expert_threshold": "9.9",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "seeds", "named", "usual"),
    [
        ({"train.log_every": 9}, 10, "", ""),  # has no effect on losses
        ({"init_from": "/runs/first"}, 10, "initialised", "from scratch unless another is named"),
        (
            SIZES,
            0,
            "64 experts of 8, 4 shared, experts at rate 0.01, fanout norm",
            "4 experts of 64, 1 shared, experts at the usual rate and no norm unless another is named",
        ),
    ],
)
def test_joined_rows_are_named_by_the_sizes_that_differ(
    changes: dict[str, Any], seeds: int, named: str, usual: str, join: Options, copy: Path, tmp_path: Path
) -> None:
    """Runs of one name are seeds of one method, and a run in both folders, here of the dense model, is taken once.

    Regression: runs that started from another run counted as seeds of those from scratch, and dense runs, which are the
    same for any number of experts, could not be joined.
    """
    change(copy, changes, but="" if seeds else "dense", seeds=seeds)
    assert et(*join) == 0
    rows = {row["method"]: row["seeds"] for row in read(tmp_path / "out" / "joined.json")["table"]}
    others = {f"{method} ({named})": 2 for method in CHOSEN if seeds or method != "dense"}
    assert rows == (dict.fromkeys(CHOSEN, 2) | others if named else dict.fromkeys(CHOSEN, 4))
    for page in ("compare.html", "compare.md"):
        text = (tmp_path / "out" / page).read_text()
        assert usual in text
        assert (f"{__version__} and 9.9" in text) == ("versions.expert_threshold" in changes)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("train.batch_size", 16, "batch_size=16 there and 2 in "),
        ("model.key_offset", "all", "key_offset='all' there"),
        ("corpus.hash", "f" * 64, "text='fff"),
        ("optim.matrix_lr", 0.5, "dense has optim.matrix_lr=0.5 there and 0.02 in"),
        ("loss", 9.0, "dense seed 1 has loss=9.0 there and "),
    ],
)
def test_comparisons_of_another_budget_text_recipe_or_result_do_not_join(
    path: str, value: Any, words: str, join: Options, copy: Path, refused: Refused
) -> None:
    if path == "loss":
        metrics = copy / "dense" / "seed_1" / "metrics.jsonl"
        *records, last = lines(metrics)
        write_lines(metrics, [*records, last | {"loss": value}])
    else:
        change(copy, {path: value})
    refused(join, f"--join {copy}: ", words)


def test_a_run_that_started_from_another_is_not_continued(copy: Path, again: Options, refused: Refused) -> None:
    change(copy, {"init_from": "/runs/first"})
    refused(again, "init_from=None differs from '/runs/first'", str(copy))


def test_a_copy_of_a_run_is_no_further_seed(copy: Path, again: Options, refused: Refused, tmp_path: Path) -> None:
    shutil.copytree(copy / "dense" / "seed_0", copy / "dense" / "seed_0.bak")
    assert et(*again) == 0
    assert len(find_runs([str(copy)])) == 2 * len(CHOSEN)
    shutil.copytree(copy / "dense" / "seed_0", copy / "dense" / "seed_7")
    for command in (again, ["compare", "--join", copy, "--out", tmp_path / "out"]):
        refused(command, f"{copy / 'dense' / 'seed_7'} contains a run with seed 0")


def test_a_name_tells_the_sizes_that_most_runs_do_not_have() -> None:
    few, many = ({"experts": f"{n} experts of 8", "steps": "4 steps"} for n in (4, 64))
    dense = {"experts": None, "steps": "9 steps"}
    runs = [("relu", few), ("dense", dense), ("relu", many), ("top_p", many)]
    names, usual = names_with_sizes(runs)
    assert names == ["relu (4 experts of 8)", "dense (9 steps)", "relu", "top_p"]
    assert usual == "64 experts of 8 and 4 steps unless another is named"
    assert names_with_sizes(runs[2:]) == (["relu", "top_p"], "")


def test_seconds_of_two_machines_are_not_compared(join: Options, small: Options, copy: Path, tmp_path: Path) -> None:
    """This applies to joined comparisons and to comparisons continued on another machine."""
    change(copy, {"machine.cpu": "another"}, seeds=10)
    assert et(*join) == 0
    assert et("compare", *small, "--rules", "token_choice", "--seeds", 1, "--out", copy) == 0
    for row in (*read(tmp_path / "out" / "joined.json")["judgement"], *record_of(copy)["judgement"]):
        assert row["seconds"] is row["at_seconds"] is None
    assert "Loss by seconds" not in (copy / "compare.html").read_text()

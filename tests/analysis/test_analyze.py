"""`et analyze` over runs of every method: all figures, reasons for those left out, one clear line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import write_lines
from expert_threshold.analysis import material as material_module
from expert_threshold.analysis.figures import FIGURES, cutoffs, load
from expert_threshold.analysis.material import Domain
from expert_threshold.analysis.methods import find_runs, read_methods, select_runs
from expert_threshold.analysis.page import save_figure
from expert_threshold.analysis.plain import NotShownError, array, plain
from expert_threshold.analysis.results import by_method
from expert_threshold.cli import main
from expert_threshold.cli.analyze import named_domains
from expert_threshold.runs import RunFolder
from tiny_runs import RUNS, copy_run

pytestmark = pytest.mark.usefixtures("small")


def analyze(*arguments: object) -> int:
    return main(["analyze", *map(str, arguments), "--dtype", "float32"])


def data_of(out: Path, name: str) -> Any:
    return json.loads((out / f"{name}.json").read_text())


def test_runs_are_called_by_what_sets_them_apart(runs: Path) -> None:
    found = read_methods(find_runs([str(runs / name) for name in RUNS]))
    named = {run.folder.path.name: run.method for run in found}
    assert named == {name: method for name, (*_, method) in RUNS.items()}
    assert {name: len(group) for name, group in by_method(found).items() if len(group) > 1} == {"ET": 2}


def test_every_figure_is_there_with_its_data_and_on_the_page(out: Path) -> None:
    html = (out / "report.html").read_text(encoding="utf-8")
    assert "Left out</h2>" in html  # fanout of token choice, and the like
    for study in FIGURES:
        assert (out / f"{study.name}.png").read_bytes().startswith(b"\x89PNG"), study.name
        assert f"<h3>{study.title}</h3>" in html
        assert f'href="{study.name}.json"' in html
        sentence = study.say(data_of(out, study.name))
        assert re.fullmatch(r"[A-Z0-9].*\.", sentence), sentence
        assert "nan" not in sentence.replace("nano", "")
        assert re.search(r"\d", sentence), sentence


def test_only_the_paper_s_question_sets_are_called_by_their_names(tmp_path: Path) -> None:
    """Any text of the name code was called HumanEval."""
    gsm8k = str(tmp_path)
    named = named_domains({"gsm8k": gsm8k, "domain": ["code=embedded"]})
    assert named == {"math": Domain(gsm8k, "GSM8K"), "code": Domain("embedded")}
    for name in ("math", "GSM8K", "start"):
        with pytest.raises(ValueError, match=f"--domain {name}=a: the name {name} is already taken"):
            named_domains({"gsm8k": gsm8k, "domain": [f"{name}=a"]})


def test_domains_of_any_name_are_reported_apart(out: Path) -> None:
    data = data_of(out, "specialisation")
    assert data["domains"] == {"code": "HumanEval", "math": "GSM8K", "prose": ""}
    for entry in data["methods"]:
        ratios = array(list(entry["ratios"].values()))
        assert ratios.shape[:2] == (3, len(entry["layers"]))
        assert 0 < max(entry["bits"]) <= np.log2(3)


@pytest.mark.parametrize("name", ["token_multiple", "specialisation", "passage_routing"])
def test_a_figure_is_drawn_from_nothing_but_its_data(name: str, out: Path, tmp_path: Path) -> None:
    study = next(study for study in FIGURES if study.name == name)
    save_figure(lambda: study.draw(data_of(out, name)), tmp_path / name)
    assert (tmp_path / f"{name}.svg").read_bytes() == (out / f"{name}.svg").read_bytes()


def stopped_early(run: Path, to: Path) -> Path:
    """A copy of a run as it was after step 4, before which it was validated once."""
    copy_run(run, to, lambda record: record if record["step"] <= 4 else None)
    shutil.rmtree(to / "checkpoints" / "step_000008")
    return to


def test_an_unfinished_seed_is_left_out_by_name_and_its_method_is_shown(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The curves of its method were cut to what it has in common with the others, which might be nothing at all."""
    copy = stopped_early(runs / "et-1", tmp_path / "et-2")
    begun = shutil.copytree(copy, tmp_path / "et-3")
    shutil.rmtree(begun / "checkpoints")
    out = tmp_path / "out"
    figures = ["--figures", "loss_by_method", "--out", out]
    assert analyze(runs / "tc", runs / "et", copy, begun, *figures) == 0
    said = capsys.readouterr().err
    unfinished = "unfinished, 4 of 8 steps, but other runs of ET are finished"
    reasons = {copy: unfinished, begun: "no checkpoint was saved yet"}
    html = (out / "report.html").read_text(encoding="utf-8")
    for path, reason in reasons.items():
        assert f"run left out: {path}: {reason}\n" in said.replace("et analyze: ", "")
        assert f"<li>Run {path}: {reason}.</li>" in html
    assert "<h1>2 runs of 2 methods</h1>" in html
    assert "2 runs left out" in html
    methods = {entry["method"]: entry for entry in data_of(out, "loss_by_method")["methods"]}
    assert methods.keys() == {"TC", "ET"}
    assert methods["ET"]["seeds"] == 1
    assert methods["ET"]["points"][-1][0] == 8 * 64


def test_a_method_without_a_finished_run_is_shown_and_marked_unfinished(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = stopped_early(runs / "et", tmp_path / "et")
    out = tmp_path / "out"
    assert analyze(runs / "tc", copy, "--figures", "loss_by_method", "--out", out) == 0
    assert f"{copy}: unfinished, 4 of 8 steps; shown up to there" in capsys.readouterr().err
    html = (out / "report.html").read_text(encoding="utf-8")
    assert "<h1>2 runs of 2 methods</h1>" in html
    assert f"Unfinished, shown as far as they got: {copy}: unfinished, 4 of 8 steps." in html
    assert "Without a final validation, so not in this table: ET." in html
    assert "After 256 tokens" in html  # the last that both were validated after, not each one's own end


def test_a_method_without_a_number_for_a_figure_is_named(runs: Path, tmp_path: Path) -> None:
    copy_run(runs / "et", tmp_path / "et", lambda record: None if record["split"] == "validation" else record)
    names = "loss_by_method,train_against_validation"
    assert analyze(runs / "tc", tmp_path / "et", "--figures", names, "--out", tmp_path / "out") == 0
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for title in ("Validation loss by method", "Training and validation loss"):
        assert re.search(f"<li>{title} of ET: [^<]+</li>", html)


def test_cutoffs_are_compared_where_recorded_never_with_zeros_by_construction(out: Path, runs: Path) -> None:
    choice, threshold = data_of(out, "cutoff_stability")["methods"]
    assert choice["bound"] is None  # every load is exact by definition, which is no finding
    train = [record for record in RunFolder.open(runs / "et").metrics.read() if record["split"] == "train"]
    layers = [record["layers"]["2"] for record in train]  # the middle one of 1 and 2
    lag = [[b - a for a, b in zip(each["cutoff"], each["batch_cutoff"], strict=True)] for each in layers]
    np.testing.assert_allclose(np.transpose(threshold["deviation"]), lag, atol=1e-5)
    assert np.abs(np.array(threshold["deviation"])[:, 3:]).max() > 0
    np.testing.assert_allclose(np.transpose(threshold["load"]), [np.divide(each["usage"], 0.25) for each in layers])
    bounds = np.array([[(e["saturation"], e["starvation"]) for e in record["layers"].values()] for record in train])
    moved = (bounds > 0).any(axis=2).reshape(len(train), -1)  # by record and expert
    assert threshold["bound"][:3] == [None] * 3  # warmup
    np.testing.assert_allclose(threshold["bound"][3:], np.mean(moved[3:], axis=1), rtol=1e-5)
    assert threshold["bound_share"] == pytest.approx(np.mean(moved[3:]), rel=1e-5)
    sentence = cutoffs.say_cutoff_stability(data_of(out, "cutoff_stability"))
    assert "a capacity bound changed the load in" in sentence


def test_optima_have_as_many_routed_tokens_as_the_rule_whose_share_of_them_is_shown(out: Path) -> None:
    """EC and ET routed fewer than the optima they were compared with, and fewer score higher."""
    data = data_of(out, "objective")
    for entry in data["methods"]:
        assert (entry["load"] == 1) == (entry["method"] in ("TC", "TC loss-free"))
        assert entry["shares"]["free"] == pytest.approx(entry["rule"] / entry["population"], rel=1e-4)
        assert entry["shares"]["fixed"] == pytest.approx(entry["rule"] / entry["balanced"], rel=1e-4)
        assert entry["balanced"] <= entry["choice"] + 1e-6 or entry["load"] != 1
    assert "(load 100 %)" in load.say_objective(data)


def test_the_data_are_what_the_runs_did(out: Path, runs: Path) -> None:
    methods = {entry["method"]: entry for entry in data_of(out, "loss_by_method")["methods"]}
    assert methods.keys() == {"dense", "TC", "TC loss-free", "EC 16", "EC 64", "ET", "ET no warmup"}
    records = [RunFolder.open(runs / name).metrics.read() for name in ("et", "et-1")]
    ends = [[record["loss"] for record in found if record["split"] == "validation"][-1] for found in records]
    assert methods["ET"]["points"][-1] == [8 * 64, pytest.approx(sum(ends) / 2, rel=1e-5)]
    assert methods["ET"]["seeds"] == 2
    pairs = [entry["method"] for entry in data_of(out, "shared_expert")["methods"]]
    assert pairs == ["ET", "ET no shared expert"]
    assert [entry["method"] for entry in data_of(out, "fanout_norm")["methods"]] == ["ET", "ET fanout norm"]
    pools = {entry["method"]: entry["pool"] for entry in data_of(out, "batch_size_scaling")["methods"]}
    assert pools == {"EC 16": 16, "EC 64": 64, "ET": None, "ET no warmup": None}
    biases = data_of(out, "cutoffs_and_biases")["methods"]
    assert {entry["method"]: entry["of"] for entry in biases}["TC loss-free"] == "bias"
    consistent = data_of(out, "routing_consistency")["methods"]
    assert all(entry["steps"] == [4, 8] for entry in consistent)
    names = consistent[0].keys() - {"method", "kind", "steps"}
    assert len(names) == 6
    for name in names:
        for (first, ahead), (back, last) in (entry[name] for entry in consistent):
            assert ahead == back
            assert first == last == (0 if name in ("joint_jsd", "total_variation") else 1)


def test_traces_are_recorded_once(out: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("recorded again")

    monkeypatch.setattr(material_module, "record_trace", fail)
    arguments = [runs / "et", runs / "tc", "--out", out, "--figures", "fanout_by_loss"]
    assert analyze(*arguments, "--tokens", 1024) == 0
    assert analyze(*arguments, "--tokens", 512) == 2


def test_figures_without_meaning_are_left_out_with_a_reason(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyze(runs / "dense", "--out", tmp_path, "--figures", "loss_by_method,fanout_by_loss,warmup") == 0
    said = capsys.readouterr()
    assert said.out == f"report: {tmp_path / 'report.html'}\n"
    assert said.err.count("left out: no run has routed experts") == 2
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Fanout by loss: no run has routed experts." in html
    assert (tmp_path / "loss_by_method.png").exists()
    assert not (tmp_path / "warmup.png").exists()


@pytest.mark.parametrize("name", ["dense", "tc", "ec-batch"])
def test_of_a_run_alone_every_figure_is_drawn_or_has_a_reason(name: str, runs: Path, tmp_path: Path) -> None:
    selection = select_runs(find_runs([str(runs / name)]))
    quiet = lambda what: lambda done, total: None  # noqa: E731
    material = material_module.Material(selection, tmp_path, None, 1024, {}, torch.device("cpu"), torch.float32, quiet)
    shown, reasons = set(), []
    for study in FIGURES:
        try:
            data = json.loads(json.dumps(plain(study.compute(material)), allow_nan=False))
        except NotShownError as reason:
            reasons.append(str(reason))
            continue
        study.draw(data)
        assert study.say(data).endswith(".")
        shown.add(study.name)
    assert all(re.fullmatch(r"\S.*[^.]", reason) for reason in reasons)
    learning = {"loss_by_method", "train_against_validation"}
    routed = {"load_balance", "passage_intensity", "routing_consistency", "load_at_scale"}
    assert shown == learning if name == "dense" else shown > learning | routed
    assert ("cutoff_stability" in shown) == (name == "ec-batch")


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(list(map(str, arguments))) == 2
    *others, line = capsys.readouterr().err.splitlines()
    assert all("failed: " in other for other in others)  # figures that are named before
    return line


def test_what_cannot_be_analysed_is_reported_in_a_line(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = shutil.copytree(runs / "et", tmp_path / "damaged")
    weights = damaged / "checkpoints" / "step_000008" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    line = refused(capsys, "analyze", damaged, "--figures", "fanout_by_loss")
    assert "damaged: it does not match the manifest" in line
    assert "step_000004, which is intact" in line
    told = refused(capsys, "analyze", runs / "et", "--out", runs / "corpus.jsonl")
    assert told.endswith("corpus.jsonl: File exists; use another path")
    absent = ["--domain", f"a={tmp_path / 'absent'}", "--out", tmp_path / "out"]
    assert "absent does not exist" in refused(capsys, "analyze", runs / "et", *absent)
    assert not (tmp_path / "out").exists()


def test_a_text_that_has_changed_is_not_traced(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    new = write_lines(tmp_path / "new.jsonl", [{"text": f"text {n}"} for n in range(90)])
    copy = copy_run(runs / "et", tmp_path / "et", data={"source": str(new)}).path
    line = refused(capsys, "analyze", copy, "--figures", "fanout_by_loss")
    assert "has changed since" in line
    assert "--data SOURCE" in line
    assert analyze(copy, "--data", new, "--figures", "fanout_by_loss", "--tokens", 512) == 0
    assert (copy / "analysis" / "fanout_by_loss.svg").exists()


def test_a_figure_that_fails_is_named_and_the_others_are_made(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One figure's error ended all of them with a traceback."""
    study = next(study for study in FIGURES if study.name == "train_against_validation")
    broken = study._replace(draw=lambda data: 1 / 0)
    monkeypatch.setattr("expert_threshold.cli.analyze.FIGURES", [broken, *(s for s in FIGURES if s is not study)])
    assert analyze(runs / "tc", "--out", tmp_path, "--figures", "train_against_validation,loss_by_method") == 0
    assert "train_against_validation: failed: ZeroDivisionError" in capsys.readouterr().err
    assert (tmp_path / "loss_by_method.png").exists()
    assert f"<h3>{study.title}</h3><p>This figure failed: ZeroDivisionError" in (tmp_path / "report.html").read_text()


def test_a_method_with_many_options_of_its_own_is_called_by_its_folder(runs: Path, tmp_path: Path) -> None:
    many = {"embed_lr": 0.1, "head_lr": 0.1, "matrix_lr": 0.1, "router_lr": 0.1}
    rates = {"a/seed_0": 0.1, "b/seed_0": 1.0, "other/a": 2.0}
    copies = [copy_run(runs / "et", tmp_path / name, optim=many | {"head_lr": rate}) for name, rate in rates.items()]
    methods = [run.method for run in read_methods([RunFolder.open(runs / "et"), *copies])]
    assert methods[:3] == ["ET", "ET of a", "ET of b"]
    assert len(set(methods)) == 4  # two folders of one name are not one method


def test_seeds_of_a_method_differ_in_nothing_else_and_count_once(runs: Path, tmp_path: Path) -> None:
    """Runs on other texts, or with other validations, counted as seeds, and so did a copy: "2 seeds, ± 0.000"."""
    copies = {
        "copy": {},
        "moved": {"data": {"source": "elsewhere"}},
        "eval": {"train": {"eval_tokens": 64, "seed": 1}},
        "text": {"corpus": {"hash": "0123456789", "name": "a text with a name that is longer than a line"}},
    }
    paths = [copy_run(runs / "et", tmp_path / name, **sections).path for name, sections in copies.items()]
    selection = select_runs(find_runs([str(runs / "et"), *map(str, paths)]))
    assert {run.folder.path.name: run.method for run in selection.runs} == {
        "et": "ET", "eval": "ET eval_tokens 64", "text": "ET on a text with a name that 01234567"
    }  # fmt: skip
    assert selection.left_out.keys() == {str(tmp_path / "copy"), str(tmp_path / "moved")}
    assert all("a seed counts once" in reason for reason in selection.left_out.values())

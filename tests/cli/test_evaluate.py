"""`et evaluate`: what it measures and writes, does not do twice, and refuses in one line."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cases import et, said
from commands import Options, Refused, edit, lines, write_lines
from commands import read as read_json
from expert_threshold.cli import evaluate as command
from expert_threshold.cli import rates
from expert_threshold.data import open_held_out, open_source, pack
from expert_threshold.evaluation import Point, centred, evaluate, read_results, results
from expert_threshold.model import flops_per_token, parameter_counts
from expert_threshold.routing import ExpertChoice
from expert_threshold.runs import RunFolder, load_model
from expert_threshold.train.log import Display


@pytest.fixture(scope="module")
def choice(small: Options, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of expert choice. No test may change it."""
    path = tmp_path_factory.mktemp("runs") / "choice"
    options = ["--steps", 2, "--eval-tokens", 10_000, "--dtype", "float32", "--rule", "expert_choice"]
    said("train", *small, *options, "--out", path)
    return path


@pytest.fixture
def runs(run: Path, choice: Path, tmp_path: Path) -> Path:
    """Runs "threshold" and "choice"."""
    shutil.copytree(choice, tmp_path / "runs" / "choice")
    return Path(shutil.copytree(run, tmp_path / "runs" / "threshold")).parent


def read(run: Path) -> Any:
    return read_json(run / "evaluation.json")


def test_runs_are_shown_together_and_each_saved(runs: Path, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert et("evaluate", runs / "threshold", runs / "choice", "--bundle", bundle, "--dtype", "float32") == 0
    printed = capsys.readouterr()
    for name in ("validation loss", "bits per byte", "by training pools, gap", "copy", "animals", "CORE", "cropped"):
        assert name in printed.out
    assert "animals" in printed.err
    for name in ("threshold", "choice"):
        result = read(runs / name)
        logged = [line for line in lines(runs / name / "metrics.jsonl") if line["split"] == "validation"][-1]
        assert result["step"] == logged["step"] == (4 if name == "threshold" else 2)
        assert result["validation"]["loss"] == pytest.approx(logged["loss"], rel=1e-4)
        assert result["validation"]["bits_per_byte"] == pytest.approx(logged["bits_per_byte"], rel=1e-4)
        assert f"{result['validation']['loss']:.4f}" in printed.out
        assert ("training_pools" in result["validation"]) == (name == "choice")
        tasks = result["core"]["tasks"]
        assert list(tasks) == ["copy", "animals"]
        assert tasks["animals"]["accuracy"] == 0.5  # the same answer to the same question
        assert tasks["copy"]["rows"] == 5
        assert result["core"]["metric"] == pytest.approx(sum(task["centred"] for task in tasks.values()) / 2)


def test_only_other_questions_and_prompts_are_asked(runs: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = runs / "choice", list[str]()
    ask = results.evaluate_task

    def note(task: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(task.label)
        if asked == ["copy", "animals"]:
            raise KeyboardInterrupt
        return ask(task, *arguments, **options)

    monkeypatch.setattr(results, "evaluate_task", note)
    assert et("evaluate", run, "--bundle", bundle, "--tasks", "copy") == 0
    assert et("evaluate", run, "--bundle", bundle) == 130
    assert read(run)["core"]["metric"] is None
    monkeypatch.setattr(command, "evaluate", None)  # validation is done
    assert et("evaluate", run, "--bundle", bundle) == 0
    assert asked == ["copy", "animals", "animals"]
    before = read(run)
    (bundle / "eval_data" / "copy.jsonl").write_text('{"context": "a", "continuation": "b"}\n' * 3)
    assert et("evaluate", run, "--bundle", bundle) == 0
    assert asked[3:] == ["copy"]
    assert read(run)["core"] == before["core"]  # of more questions
    assert read(run)["validation"] == before["validation"]
    yaml = (bundle / "core.yaml").read_text()
    for shots in ("[2]", "[2], continuation_delimiter: '-'"):  # whose old score was once reported
        (bundle / "core.yaml").write_text(yaml.replace("num_fewshot: [1]", f"num_fewshot: {shots}"))
        for _ in range(2):
            assert et("evaluate", run, "--bundle", bundle, "--tasks", "copy") == 0
    assert asked[4:] == ["copy", "copy"]


def test_the_loss_on_other_text_is_measured_once_and_by_both_protocols(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = [{"question": f"{i} + 1?", "answer": "a cat" * 9} for i in range(40)]
    math = write_lines(tmp_path / "math.jsonl", questions)
    short = tmp_path / "short.txt"
    short.write_text("the cat sat")
    both = ["evaluate", runs / "threshold", runs / "choice", "--no-validation", "--dtype", "float32"]
    both += ["--data", math, "--data", short]
    assert et(*both) == 0
    printed = capsys.readouterr()
    assert "by training pools, gap" in printed.out
    assert "short.txt: too short to form training pools, since a batch has 64 tokens" in printed.err
    for name in ("threshold", "choice"):
        data = read(runs / name)["data"]
        assert list(data) == [str(math), str(short)]
        model, tokenizer = load_model(runs / name)
        tokens = pack(open_held_out(str(math)), tokenizer, "validation")
        causal, found = evaluate(model, tokens, tokenizer), data[str(math)]
        assert (found["tokens"], found["bytes"]) == (causal.tokens, tokens.bytes)
        assert tokens.bytes == sum(len(f"{i} + 1?\n" + "a cat" * 9) for i in range(40))
        assert found["loss"] == pytest.approx(causal.loss, rel=1e-4)
        assert f"{found['loss']:.4f}" in printed.out
        assert ("training_pools" in found) == (name == "choice")
        assert "training_pools" not in data[str(short)]
    pooled = evaluate(model, tokens, tokenizer, batch_size=2, training_pools=True)
    same = evaluate(model, tokens, tokenizer, max_tokens=pooled.tokens)
    assert found["training_pools"]["loss"] == pytest.approx(pooled.loss, rel=1e-4)
    assert found["training_pools"]["causal_loss"] == pytest.approx(same.loss, rel=1e-4)
    assert found["training_pools"]["tokens"] == pooled.tokens < causal.tokens
    assert found["training_pools"]["causal_loss"] != found["loss"]  # of fewer tokens
    assert same.loss != pooled.loss
    assert f"{pooled.loss:.4f} {same.loss - pooled.loss:+.4f}" in printed.out
    monkeypatch.setattr(command, "evaluate", None)  # it is known
    assert et(*both) == 0
    math.write_text(json.dumps({"text": "another"}))
    with pytest.raises(TypeError):
        et(*both)
    capsys.readouterr()


def test_two_evaluations_of_a_run_at_once_keep_each_others_results(
    copy: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(module: Any, name: str, *options: object) -> None:
        real = getattr(module, name)

        def measured(*given: Any, **how: Any) -> Any:
            monkeypatch.setattr(module, name, real)
            assert et("evaluate", copy, "--no-validation", *options) == 0
            return real(*given, **how)

        monkeypatch.setattr(module, name, measured)

    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in texts:
        path.write_text("the cat sat " * 9)
    meanwhile(results, "evaluate_task", "--bundle", bundle, "--tasks", "animals")
    assert et("evaluate", copy, "--no-validation", "--bundle", bundle, "--tasks", "copy") == 0
    meanwhile(command, "evaluate", "--data", texts[0])
    assert et("evaluate", copy, "--no-validation", "--data", texts[1]) == 0
    assert len(read(copy)["answers"]) == 2
    assert list(read(copy)["data"]) == list(map(str, texts))


def test_a_loss_of_other_tokens_is_measured_by_itself(copy: Path) -> None:
    evaluate = ["evaluate", copy, "--json", "--eval-tokens"]
    counts = [json.loads(said(*evaluate, most))[0]["validation"]["tokens"] for most in ("none", 64, "none")]
    assert counts[1] < counts[0] == counts[2]


def test_a_missing_bundle_is_reported_with_advice(runs: Path, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert et("evaluate", runs / "threshold", "--json") == 0
    printed = capsys.readouterr()
    json.loads(printed.out)
    assert "CORE was not evaluated: download its questions with et data core" in printed.err
    for chosen in (["--bundle", bundle], ["--bundle", "none"]):
        assert et("evaluate", runs / "threshold", *chosen) == 0
        assert "CORE was not evaluated" not in capsys.readouterr().err


def test_evaluating_less_loses_nothing_of_more(runs: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One task left CORE unknown, fewer questions replaced those of all, other baselines dropped the other tasks."""
    run = runs / "threshold"
    evaluate = ["evaluate", run, "--bundle", bundle, "--no-validation", "--json"]

    def core(*options: object) -> Any:
        found = json.loads(said(*evaluate, *options))[0]
        assert found["run"] == str(run)
        assert "validation" not in found
        return found["core"]

    few = core("--max-per-task", 3)
    assert (few["max_per_task"], few["tasks"]["copy"]["rows"]) == (3, 3)
    core("--tasks", "copy")
    assert read(run)["core"] == few  # of few questions, but of all tasks
    full = core()
    assert full["metric"] is not None
    assert read(run)["core"] == full
    assert core("--max-per-task", 3) == few
    assert read(run)["core"] == full
    monkeypatch.setattr(results, "evaluate_task", None)  # everything is known
    assert core("--tasks", "animals") == core() == full
    assert core("--tasks", "copy", "--max-per-task", 3) == few
    assert core("--tasks", "animals", "--max-per-task", 5) == full | {"max_per_task": 5}  # no task has more
    (bundle / "eval_meta_data.csv").write_text("Eval Task,Random baseline\ncopy,10\nanimals,25\n")
    moved = core("--tasks", "animals")
    assert [task["baseline"] for task in moved["tasks"].values()] == [0.1, 0.25]
    assert moved["metric"] == pytest.approx(sum(task["centred"] for task in moved["tasks"].values()) / 2)
    (bundle / "eval_data" / "copy.jsonl").write_text('{"context": "a", "continuation": "b"}\n' * 3)
    other = core("--tasks", "animals")
    assert other["metric"] is None  # copy was measured on other questions
    assert list(other["tasks"]) == ["animals"]
    assert read(run)["core"]["tasks"] == moved["tasks"]


def test_a_text_called_validation_is_another_one(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation" / "text.txt").write_text("the cat sat on the mat " * 50)
    printed = said("evaluate", runs / "threshold", "--data", "validation", "--data", tmp_path / "validation")
    losses = re.findall(r"│ (\S+) loss +│ +(\d\.\d+)", printed)
    assert [name for name, _ in losses] == ["validation", f"{tmp_path.name}/validation"]
    assert losses[0][1] != losses[1][1]


def test_harness_tasks_keep_the_saved_results_of_others(runs: Path) -> None:
    """Regression: saved results were erased before the new tasks ran."""

    class Harness:
        def ask(self, *_: Any) -> Any:
            yield "b", {"b": {"acc": {"value": 0.5, "stderr": None}}}
            raise ValueError("its questions cannot be loaded")

    model, tokenizer = load_model(runs / "threshold")
    folder = RunFolder.open(runs / "threshold")
    saved = results.Results(folder.path, model, tokenizer, 4)
    saved.write("harness", {"a": {"acc": {"value": 0.1, "stderr": None}}})
    run = command.Run(folder, model, tokenizer, saved, Display(Console(file=io.StringIO())))
    with pytest.raises(ValueError, match="cannot be loaded"):
        run.ask_harness(Harness(), None)  # type: ignore[arg-type]
    assert {name: found["acc"]["value"] for name, found in saved.read()["harness"].items()} == {"a": 0.1, "b": 0.5}


def test_a_core_belongs_to_a_bundle(runs: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the CORE of a second bundle, with one task, was shown with both bundles' tasks, also on a card."""
    run = runs / "threshold"
    one = Path(shutil.copytree(bundle, tmp_path / "one"))
    yaml = (one / "core.yaml").read_text()
    (one / "core.yaml").write_text(yaml[: yaml.index("- {label: animals")])
    assert et("evaluate", run, "--bundle", bundle, "--no-validation") == 0
    both = read(run)["core"]
    monkeypatch.setattr(results, "evaluate_task", None)  # a task that both have is known
    single = json.loads(said("evaluate", run, "--bundle", one, "--no-validation", "--json"))[0]["core"]
    assert single["tasks"].keys() == {"copy"}
    assert single["metric"] == pytest.approx(single["tasks"]["copy"]["centred"])
    assert read(run)["core"] == both


def test_results_of_other_steps_and_dtypes_are_kept(runs: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: an evaluation of another checkpoint, or in another dtype, replaced them."""
    run = runs / "threshold"
    cases = [(4, "float32"), (2, "float32"), (4, "bfloat16")]

    def evaluated() -> list[Any]:
        evaluate = ["evaluate", run, "--bundle", bundle, "--json"]
        return [json.loads(said(*evaluate, "--step", step, "--dtype", dtype)) for step, dtype in cases]

    first = evaluated()
    saved = read(run)
    assert [(each["step"], each["dtype"]) for each in (saved, *saved["others"])] == cases[::-1]
    assert [read_results(run, step)["dtype"] for step in (2, 4)] == ["float32", "bfloat16"]
    assert read_results(run, 3) == {}
    monkeypatch.setattr(command, "evaluate", None)  # everything is known
    monkeypatch.setattr(results, "evaluate_task", None)
    assert evaluated() == first


def test_results_of_another_model_are_forgotten(runs: Path) -> None:
    """Regression: the same weights with another scale of queries had the same key."""
    run = runs / "threshold"
    assert et("evaluate", run, "--dtype", "float32") == 0
    first = read(run)
    for name in ("weights", "tokenizer"):
        (run / "evaluation.json").write_text(json.dumps(first | {name: "others", "core": {}}))
        assert et("evaluate", run, "--dtype", "float32") == 0
        assert read(run) == first
    model, tokenizer = load_model(run)
    for scale in (1.0, 2.0):
        model.config = replace(model.config, qk_scale=scale)
        assert ("validation" in results.Results(run, model, tokenizer, 4).read()) == (scale == 1.0)


def test_other_baselines_move_what_is_centred_and_nothing_else(runs: Path, bundle: Path) -> None:
    yaml = (bundle / "core.yaml").read_text()
    (bundle / "core.yaml").write_text(yaml.replace("label: animals", "label: agi_eval_lsat_ar"))
    (bundle / "eval_meta_data.csv").write_text("Eval Task,Random baseline\ncopy,0\nagi_eval_lsat_ar,20\n")
    run = runs / "threshold"
    for name, baseline in (("nanochat", 0.2), ("dclm", 0.25)):
        assert et("evaluate", run, "--bundle", bundle, "--no-validation", "--baselines", name) == 0
        result = read(run)["core"]
        assert result["baselines"] == name
        assert result["tasks"]["agi_eval_lsat_ar"]["centred"] == centred(0.5, baseline)


def test_a_changed_missing_or_unknown_text_is_refused(copy: Path, text: Path, refused: Refused, tmp_path: Path) -> None:
    """Regression: for a missing text, the remedy was that of `et train`, another text."""
    own = tmp_path / "own.jsonl"
    own.write_text(text.read_text() + '{"text": "more"}\n')
    with edit(copy / "config.json") as config:
        config["data"]["source"] = str(own)
    refused(["evaluate", copy], "has changed since", "--no-validation")
    own.unlink()
    for options in ([], ["--rates", "1"]):
        refused(["evaluate", copy, *options], f"{copy}: ", f"({own} does not exist", "; restore it, or ")
    shutil.copytree(copy, tmp_path / "bare", ignore=shutil.ignore_patterns("checkpoints"))
    refused(["evaluate", tmp_path / "bare"], "has no checkpoint yet")
    with edit(copy / "config.json") as config:
        del config["corpus"], config["data"]  # as of an imported model
    refused(["evaluate", copy], "the validation text is not recorded", "--no-validation", "--data")
    refused(["calibrate", copy, "--to", tmp_path / "calibrated"], "the validation text is not recorded", "--data")


# At other rates: loss against active compute.


@pytest.fixture
def dialled(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


def test_rates_give_the_loss_of_each_run_at_each_of_them_as_table_json_and_figure(dialled: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra viz")
    both = [dialled / "expert_choice", dialled / "expert_threshold"]
    printed = said("evaluate", *both, "--rates", "0,0.5,2,4", "--dtype", "float32")
    for run in both:
        points = read_json(run / "rates.json")["points"]
        assert not (run / "evaluation.json").exists()
        assert [point["rate"] for point in points] == [None, 0, 0.5, 2, 4]
        assert (points[1]["fanout"], points[4]["fanout"]) == (0, 4)
        assert 0 < points[2]["fanout"] < points[3]["fanout"] < 4
        for point in points:
            model, tokenizer = load_model(run, rate=point["rate"])
            tokens = pack(open_source(str(dialled / "corpus.jsonl")), tokenizer, "validation")
            expected = evaluate(model, tokens, tokenizer)
            assert point["loss"] == pytest.approx(expected.loss, rel=1e-5)
            assert point["tokens"] == expected.tokens
            fanouts = [float(observation.fanout_mean) for observation in expected.observations]
            assert point["fanouts"] == pytest.approx(fanouts, rel=1e-5)
            assert f"{point['loss']:.4f}" in printed
            active = parameter_counts(model.config, rate=point["fanout"])["active"]
            assert point["params_active"] == pytest.approx(active, abs=1)
            forward = flops_per_token(model.config, rate=point["fanout"]) / 3
            assert point["flops_per_token"] == pytest.approx(forward, rel=1e-4)
        assert points[4]["params_active"] == parameter_counts(model.config)["total"]
    assert (both[0] / "rates.png").read_bytes().startswith(b"\x89PNG")
    drawn = (both[0] / "rates.svg").read_text()
    assert all(text in drawn for text in ("expert_choice", "expert_threshold", "routed experts per token"))
    again = json.loads(said("evaluate", *both, "--rates", "1,1", "--json"))
    assert [found["run"] for found in again] == ["expert_choice", "expert_threshold"]
    assert [point["rate"] for point in again[0]["points"]] == [None, 1]
    assert again == [read_json(run / "rates.json") for run in both]


def test_without_matplotlib_nothing_is_measured(
    dialled: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("expert_threshold.cli.evaluate.measure_rates", None)
    refused(["evaluate", dialled / "expert_choice", "--rates", "1"], "pip install")


def test_losses_that_are_no_numbers_are_shown_and_drawn(dialled: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra viz")
    folder = RunFolder.open(dialled / "expert_choice")
    point = Point(None, 1.0, (1.0,), math.nan, math.nan, 8, 100, 1000)
    found = rates.record(folder, 1, ExpertChoice(4), [point, point._replace(rate=0.5)])
    json.dumps(found, allow_nan=False)
    assert rates.rates_table({"run": found}).row_count == 2
    rates.draw_dial({"run": found})


def test_results_at_a_rate_are_kept_apart_from_those_as_trained(dialled: Path) -> None:
    run = dialled / "expert_threshold"
    assert et("evaluate", run, "--dtype", "float32") == 0
    trained = (run / "evaluation.json").read_text()
    printed = said("evaluate", run, "--rate", 4, "--dtype", "float32")
    assert (run / "evaluation.json").read_text() == trained
    at_rate = read_json(run / "evaluation_rate_4.json")
    assert at_rate["rate"] == 4
    assert at_rate["validation"]["loss"] != json.loads(trained)["validation"]["loss"]
    assert f"{at_rate['validation']['loss']:.4f}" in printed

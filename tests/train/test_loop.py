"""A run: what it writes, and that a resumed one equals one that never stopped."""

from __future__ import annotations

import functools
import json
import math
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from cases import TRAINED
from commands import CLOCKS, content, without
from expert_threshold.data import Tokenizer
from expert_threshold.model import GPT, GPTConfig, gpt
from expert_threshold.optim import NANOCHAT, OptimConfig
from expert_threshold.routing import ExpertChoice, ExpertThreshold, NullSlots, QuantileBalancing, Rule, TokenChoice
from expert_threshold.runs import RunFolder, load_model
from expert_threshold.train import TrainConfig, TrainResult
from expert_threshold.train.checks import require_pools_fit

from .conftest import Start, assert_same_bytes, spoil, tiny


def metrics(path: Path, split: str | None = None) -> list[dict[str, Any]]:
    records = without(RunFolder.open(path).metrics.read(), CLOCKS)
    return [record for record in records if split in (None, record["split"])]


def assert_same_checkpoint(a: Path, b: Path) -> None:
    """Every byte of the tensors in their last checkpoints."""
    one, other = (RunFolder.open(path).load_checkpoint() for path in (a, b))
    assert one.tensors.keys() == other.tensors.keys()
    for part, tensors in one.tensors.items():
        assert_same_bytes(tensors, other.tensors[part])


def assert_same_run(a: Path, b: Path) -> None:
    """Every byte of their last checkpoints and every number of their metrics, but for clocks."""
    one, other = (RunFolder.open(path).load_checkpoint() for path in (a, b))
    assert one.step == other.step
    assert without(one.state, CLOCKS) == without(other.state, CLOCKS)
    assert_same_checkpoint(a, b)
    assert metrics(a) == metrics(b)


def forget_after(folder: Path, step: int) -> None:
    """Leave the run as if killed between `step`, which was saved, and the next checkpoint."""
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)


@pytest.mark.parametrize(
    ("name", "accumulation", "optim"),
    [
        *((name, 2, OptimConfig()) for name in TRAINED),
        ("expert_threshold", 1, OptimConfig(clip=0.5, router_optimizer="adamw")),
        ("expert_threshold", 1, NANOCHAT),
        ("dense", 1, NANOCHAT),
    ],
)
def test_a_resumed_run_equals_one_that_never_stopped(
    name: str, accumulation: int, optim: OptimConfig, start: Start, tmp_path: Path
) -> None:
    """Step 4 is in the middle of an interval of metrics, which has 3 steps.

    Without accumulation an interval's loss was its cross-entropy's very tensor, and saving failed.
    """
    run = functools.partial(start, model=tiny(TRAINED[name]), optim=optim, accumulation=accumulation, steps=6)
    run("whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "halves")
    forget_after(tmp_path / "halves", 4)
    torch.manual_seed(999)
    result = run("halves", resume=True)
    assert (result.step, result.finished) == (6, True)
    assert_same_run(tmp_path / "whole", tmp_path / "halves")


def test_another_seed_is_another_run(start: Start, tmp_path: Path) -> None:
    """So that the comparison above can fail."""
    start("one", steps=2, eval_every=None)
    start("two", steps=2, eval_every=None, seed=1)
    start("three", steps=2, eval_every=None)
    assert_same_run(tmp_path / "one", tmp_path / "three")
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "one", tmp_path / "two")


def test_a_run_killed_before_its_first_checkpoint_begins_anew(start: Start, tmp_path: Path) -> None:
    sampling: Any = {"sample_every": 8, "sample": lambda *_: "text"}
    start("whole", **sampling)
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    forget_after(tmp_path / "killed", 0)
    (tmp_path / "killed" / "tokenizer.json").write_text("{")
    for name in ("step_000008.txt", "step_000008 (copy).txt"):  # samples of a step that is forgotten, too
        (tmp_path / "killed" / "samples" / name).write_text("old")
    start("killed", resume=True, **sampling)
    assert (tmp_path / "killed" / "samples" / "step_000008.txt").read_text() == "text"
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    assert load_model(tmp_path / "killed")[1].vocab_size == 300


def test_a_run_killed_between_saving_and_validating_validates_when_resumed(start: Start, tmp_path: Path) -> None:
    start("whole", sample_every=8, sample=lambda *_: "text")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert json.loads(lines[-1])["split"] == "validation"
    (tmp_path / "killed" / "metrics.jsonl").write_text("".join(lines[:-1]))
    (tmp_path / "killed" / "samples" / "step_000008.txt").unlink()
    result = start("killed", resume=True, sample_every=8, sample=lambda *_: "text")
    assert result.loss == json.loads(lines[-1])["loss"]
    assert (tmp_path / "killed" / "samples" / "step_000008.txt").read_text() == "text"
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_resuming_a_finished_run_changes_nothing(start: Start, tmp_path: Path) -> None:
    first = start()
    before = content(tmp_path / "run")
    assert start(resume=True)._replace(elapsed=0) == first._replace(elapsed=0)
    assert content(tmp_path / "run") == before


def test_saving_comes_before_validating(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expert_threshold.train.evaluations.evaluate", mock.Mock(side_effect=RuntimeError))
    with pytest.raises(RuntimeError):
        start()
    assert RunFolder.open(tmp_path / "run").checkpoints() == [4]


@pytest.mark.parametrize("name", TRAINED)
def test_metrics_have_what_reports_read(name: str, start: Start, tmp_path: Path) -> None:
    result = start(model=tiny(TRAINED[name]))
    train_lines, validations = metrics(tmp_path / "run", "train"), metrics(tmp_path / "run", "validation")
    assert [(line["step"], line["steps"]) for line in train_lines] == [(3, 3), (6, 3), (8, 2)]
    assert [line["step"] for line in validations] == [4, 8]
    assert (result.loss, result.bits_per_byte) == (validations[-1]["loss"], validations[-1]["bits_per_byte"])
    with_pools = {"cutoff", "batch_cutoff", "cutoff_distance", "raw_usage", "saturation", "starvation"}
    for line in train_lines:
        assert line["tokens"] == line["step"] * 2 * 2 * 16
        assert line["learning_rate"].keys() >= {"matrix", "embed", "head"}
        assert (line["loss"] > line["cross_entropy"]) == (name == "token_choice_aux")
        assert line["layers"].keys() == (set() if name == "dense" else {"1"})
        for layer in line["layers"].values():
            assert layer.keys() == {"usage", "load_spread", "fanout_mean", "fanout_std", "score_std", "gate_std"} | (
                set() if name in ("token_choice", "token_choice_aux", "loss_free") else with_pools
            ) | ({"bias"} if name == "loss_free" else set())
            of_layers = {"load_spread", "fanout_mean", "fanout_std"}
            assert all(isinstance(layer[key], float) for key in of_layers)
            assert all(len(layer[key]) == 4 for key in layer.keys() - of_layers)  # one number per expert
            assert math.isclose(sum(layer["usage"]), layer["fanout_mean"], rel_tol=1e-5)
            assert layer["load_spread"] >= 1
    for line in validations:
        assert min(line["loss"], line["bits_per_byte"]) > 0
        for layer in line["layers"].values():
            assert len(layer["usage"]) == 4
            assert sum(layer["fanout_counts"]) == line["tokens"]


def test_a_run_folder_records_all_that_repeats_it(start: Start, tmp_path: Path, corpus: Path) -> None:
    start(log_every=4)
    config = RunFolder.open(tmp_path / "run").config
    assert GPTConfig.from_dict(config) == tiny()
    assert OptimConfig(**config["optim"]) == OptimConfig()
    assert TrainConfig(**config["train"]).log_every == 4
    assert (config["train"]["device"], config["train"]["threads"]) == ("cpu", 1)
    assert config["train"]["dtype"] in ("float32", "bfloat16")
    assert config["data"]["source"] == str(corpus.resolve())
    assert len(config["corpus"]["hash"]) == 64
    assert config["versions"]["torch"] == torch.__version__


def test_only_the_newest_checkpoints_stay_where_that_is_asked_for(start: Start, tmp_path: Path) -> None:
    start(checkpoint_every=2, keep_checkpoints=2)
    assert RunFolder.open(tmp_path / "run").checkpoints() == [6, 8]


def test_without_intervals_a_run_saves_at_its_end_and_does_not_validate(start: Start, tmp_path: Path) -> None:
    result = start(checkpoint_every=None, eval_every=None)
    assert RunFolder.open(tmp_path / "run").checkpoints() == [8]
    assert metrics(tmp_path / "run", "validation") == []
    assert result.loss is result.bits_per_byte is None


def test_samples_are_written_and_leave_the_run_as_it_was(start: Start, tmp_path: Path) -> None:
    def sample(model: GPT, tokenizer: Tokenizer, step: int) -> str:
        model.eval()
        torch.rand(3)
        return f"γ at step {step}, vocabulary of {tokenizer.vocab_size}"

    start("with", sample_every=3, sample=sample)
    start("without")
    samples = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "with" / "samples").iterdir()}
    assert samples == {f"step_00000{s}.txt": f"γ at step {s}, vocabulary of 300" for s in (3, 6, 8)}
    assert_same_run(tmp_path / "with", tmp_path / "without")


def test_activation_checkpointing_is_an_option(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    recompute = mock.Mock(wraps=gpt.checkpoint)
    monkeypatch.setattr(gpt, "checkpoint", recompute)
    start("plain", steps=1)
    assert not recompute.called
    start("recomputed", steps=1, activation_checkpointing=True)
    assert recompute.call_count == 1 * 2 * 2  # steps, micro-batches, layers


LOSS_FREE, SLOTS = TokenChoice(4, 1, balance="loss_free"), NullSlots(4, 1, null_slots=3)
OVER_GATES = TokenChoice(4, 1, balance="loss_free", over="gates")


@pytest.mark.parametrize(
    ("first", "second", "loaded"),
    [
        (None, None, None),
        *((TRAINED[name], TRAINED[name], True) for name in ("token_choice", "expert_choice", "expert_threshold")),
        (ExpertThreshold(4, 1, warmup_steps=2), ExpertThreshold(4, 1, warmup_steps=6), True),
        (ExpertChoice(4, 1), ExpertThreshold(4, 1), True),
        (ExpertChoice(4, 1), TokenChoice(4, 1), False),
        (QuantileBalancing(4, 1), ExpertThreshold(4, 1, warmup_steps=0), False),
        (ExpertThreshold(4, 1), QuantileBalancing(4, 1, decay=0.9), False),
        (LOSS_FREE, OVER_GATES, False),
        (OVER_GATES, replace(OVER_GATES, gate="softmax"), False),
        (LOSS_FREE, SLOTS, False),
        (SLOTS, ExpertThreshold(4, 1, gate="softmax", null_scores=2), False),
        (SLOTS, ExpertThreshold(4, 1, gate="softmax", null_scores=3), False),
    ],
    ids=str,
)
def test_a_run_begins_with_the_weights_and_the_tokenizer_of_another_and_its_rules_state_if_in_the_same_units(
    first: Rule | None, second: Any, loaded: bool | None, start: Start, tmp_path: Path, plain: Any
) -> None:
    """Regressions: it kept the old count of steps, so that the new run's warmup was skipped; prices were loaded as
    cutoffs, whose fields have the same names; and another number of scores ended in a traceback.
    """
    start("first", tiny(first))
    still = OptimConfig(matrix_lr=1e-30, embed_lr=1e-30, head_lr=1e-30)
    other = tiny(second, context=8, z_loss=0.001, initialization="nanochat", dispatch="reference")
    start("second", other, still, steps=1, init_from=tmp_path / "first", seed=5, console=plain.console)
    theirs, mine = (RunFolder.open(tmp_path / name).load_checkpoint().tensors["model"] for name in ("first", "second"))
    state = {name.partition(".router.state_")[2]: tensor for name, tensor in mine.items() if ".router.state_" in name}
    for name in [name for name in mine if ".router.state_" not in name]:
        kept = 4 if len(mine[name]) != len(theirs[name]) else None  # rows of null scores are new
        torch.testing.assert_close(mine[name][:kept], theirs[name][:kept], rtol=0, atol=1e-6)
        assert kept is None or (mine[name][kept:].norm(dim=1) > 0.1).all()
    a, b = (tmp_path / name / "tokenizer.json" for name in ("first", "second"))
    assert a.read_bytes() == b.read_bytes()
    assert RunFolder.open(tmp_path / "second").config["init_from"] == str((tmp_path / "first").resolve())
    said = " ".join(plain.text().split())
    assert f"{tmp_path / 'first'}, step 8; " in said
    assert {True: "is loaded", False: "is not loaded", None: "optimizers start"}[loaded] in said
    assert not getattr(second, "warmup_steps", 0) or f"a new warmup of {second.warmup_steps} steps starts" in said
    assert state.get("step", 1) == 1
    if "weight" in state:
        assert state["weight"] == pytest.approx(1 - second.decay ** (9 if loaded else 1), rel=1e-3)
    if "bias" in state:
        assert state["bias"].abs().max() < 1.5 * second.bias_rate


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (tiny(layers=3), "layers=3, but --init-from .*first has 2"),
        (tiny(smear=True), "smear=True, but --init-from .*first has False"),
        (tiny(windows="SL"), "windows='SL', but --init-from .*first has None"),
        (tiny(vocab_size=290), "vocab_size=290, but .* has 300"),
        (tiny(ExpertThreshold(8, 1)), "num_experts=8, but .* has 4"),
        (tiny(None), "num_experts=None, but .* has 4"),
        (tiny(activation="swiglu"), "activation='swiglu', but .* has 'relu2'"),
    ],
)
def test_another_architecture_is_refused_in_one_line(
    model: GPTConfig, message: str, start: Start, tmp_path: Path
) -> None:
    start("first", steps=1)
    with pytest.raises(ValueError, match=message) as error:
        start("second", model, init_from=tmp_path / "first")
    assert "\n" not in str(error.value)
    assert list((tmp_path / "second").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 4}, "steps=4 is not above the 8 steps of"),
        ({"batch_size": 4}, "batch_size=4 differs from 2"),
        ({"model": tiny(context=8)}, "context=8 differs from 16"),
        ({"optim": OptimConfig(betas=(0.8, 0.95))}, r"betas=\[0.8, 0.95\] differs"),
        ({"init_from": Path("other")}, "init_from=other starts a new run"),
    ],
)
def test_what_a_run_learns_with_cannot_change_midway(changes: dict[str, Any], message: str, start: Start) -> None:
    start()
    with pytest.raises(ValueError, match=message):
        start(resume=True, **changes)


def test_a_config_file_edited_by_hand_is_refused_with_each_option(start: Start, tmp_path: Path) -> None:
    start()
    run = RunFolder.open(tmp_path / "run")
    config = run.config
    config["optim"]["matrix_lr"] = 0.5
    run.write_config(config | {"train": config["train"] | {"steps": 16}})
    both = r"optim.matrix_lr=0.5 differs from 0.02; train.steps=16 differs from 8, as used for step 8"
    with pytest.raises(ValueError, match=both):
        start(resume=True, steps=16, optim=OptimConfig(matrix_lr=0.5))
    assert run.checkpoints() == [4, 8]


def test_a_finished_run_is_extended_and_each_resume_of_it_is_the_same(start: Start, tmp_path: Path, plain: Any) -> None:
    """It has the learning rates of a longer run from there on, and of the shorter one where it is repeated before."""
    often = {"log_every": 1, "eval_every": 4}
    start(**often)
    assert start(resume=True, steps=16, console=plain.console, **often).step == 16
    start("longer", steps=16, **often)
    runs = tmp_path / "run", tmp_path / "longer"
    rates, longer = ([line["learning_rate"] for line in metrics(path, "train")] for path in runs)
    assert rates[7]["matrix"] < rates[8]["matrix"]
    assert rates[8:] == [pytest.approx(each) for each in longer[8:]]
    assert "extended to 16 steps" in plain.text()
    [event] = metrics(tmp_path / "run", "event")
    assert (event["event"], event["step"], event["steps"]) == ("extended", 8, 16)
    config = RunFolder.open(tmp_path / "run").config
    assert (config["train"]["steps"], len(config["time"]["decisions"])) == (16, 2)
    for step in (12, 4):
        again = tmp_path / f"from_{step}"
        shutil.copytree(tmp_path / "run", again)
        forget_after(again, step)
        start(again.name, resume=True, steps=16, **often)
        assert_same_checkpoint(tmp_path / "run", again)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_every": 3}, "sample_every=3 needs the argument `sample`"),
        ({"model": tiny(ExpertThreshold(64, 1))}, "k = .* = 0"),
        ({"model": tiny(ExpertChoice(4, 1, pool=7))}, "pool=7 does not divide"),
        ({"model": tiny(ExpertChoice(32, 1, pool="sequence"))}, "k = .* = 0"),
        ({"model": tiny(vocab_size=256)}, "vocab_size=256 is too small; use at least 257"),
        ({"core_max_per_task": 5}, "core_max_per_task=5 has no effect without CORE"),
        ({"device": "cuda"}, "device=cuda: torch .* finds no CUDA device"),
    ],
)
def test_what_cannot_train_is_refused_before_the_text_is_read_and_nothing_is_written(
    options: dict[str, Any], message: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("expert_threshold.train.prepare.open_source", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message) as error:
        start(**options)
    assert "\n" not in str(error.value)
    assert list((tmp_path / "run").iterdir()) == []


def test_pools_are_checked_without_memory_for_them() -> None:
    config = TrainConfig(batch_size=2**40)
    require_pools_fit(tiny(ExpertThreshold(pool="batch")), config)
    with pytest.raises(ValueError, match="pool=7 does not divide"):
        require_pools_fit(tiny(ExpertThreshold(pool=7)), config)


def test_skipped_steps_are_told_and_counted_and_ten_in_a_row_end_the_run_and_harm_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Any
) -> None:
    spoil(monkeypatch, [1, *range(4, 100)])
    with pytest.raises(ValueError, match=r"10 steps in a row .* step 14, because the loss .*matrix_lr=0.02") as error:
        start(steps=20, accumulation=1, console=plain.console)
    assert "\n" not in str(error.value)
    run = RunFolder.open(tmp_path / "run")
    assert run.checkpoints() == [4, 8, 12]
    model = [run.load_checkpoint(step).tensors["model"] for step in run.checkpoints()]
    assert all(torch.equal(model[0][name], model[2][name]) for name in model[0])
    *events, last = metrics(tmp_path / "run", "event")
    skipped = [(2, 1), *((step, step - 4) for step in range(5, 15))]
    assert [(event["step"], event["in_a_row"]) for event in events] == skipped
    assert {event["event"] for event in events} == {"skipped_step"}
    assert last["event"] == "diverged"
    lines = metrics(tmp_path / "run", "train")
    assert [(line["step"], line["skipped"]) for line in lines[:2]] == [(3, 1), (6, 3)]
    assert all(math.isfinite(line["loss"]) for line in lines[:2])
    assert "step 2: the loss is not finite" in plain.text()


def test_a_dead_expert_is_told_once(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Any) -> None:
    init = GPT.init_weights

    def kill(model: GPT) -> None:
        init(model)
        for _, moe in model.moe_layers():
            moe.router.state.bias[2] = -1e9

    monkeypatch.setattr(GPT, "init_weights", kill)
    model = tiny(TokenChoice(4, 2, balance="loss_free", bias_rate=0.001))
    start(model=model, console=plain.console, log_every=2)
    [event] = metrics(tmp_path / "run", "event")
    assert (event["event"], event["step"], event["layer"], event["expert"]) == ("dead_expert", 2, 1, 2)
    assert plain.text().count("expert 2 of layer 1 got no token in the last 2 steps") == 1
    forget_after(tmp_path / "run", 4)
    start(model=model, console=plain.console, log_every=2, resume=True)
    assert len(metrics(tmp_path / "run", "event")) == 1


LONG = {"steps": 9, "log_every": 4, "eval_every": None, "checkpoint_every": 5}


def signals(run: Path, *numbers: signal.Signals) -> Callable[..., str]:
    """A sample that is interrupted by these signals at step 6, after the checkpoint of step 5 was saved."""

    def sample(model: GPT, tokenizer: Tokenizer, step: int) -> str:
        while step == 6 and not RunFolder(run).checkpoints():  # it saves in the background
            time.sleep(0.01)
        for number in numbers if step == 6 else ():
            signal.raise_signal(number)
        return ""

    return sample


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_signal_saves_and_ends_the_run_and_resuming_equals_never_having_stopped(
    number: signal.Signals, start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A terminal's SIGHUP comes twice, and SIGTERM after Slurm's SIGUSR1."""
    numbers = [number] * (1 if number == signal.SIGINT else 2)
    result = start("stopped", sample_every=1, sample=signals(tmp_path / "stopped", *numbers), **LONG)
    assert (result.step, result.finished) == (6, False)
    assert capfd.readouterr().err.count("finishing this step and saving") == 1
    assert RunFolder.open(tmp_path / "stopped").latest_checkpoint() == 6
    assert not (tmp_path / "stopped" / ".lock").exists()
    start("stopped", resume=True, **LONG)
    start("whole", **LONG)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_a_second_ctrl_c_quits_at_once_and_harms_nothing_saved(start: Start, tmp_path: Path) -> None:
    sample = signals(tmp_path / "stopped", signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        start("stopped", sample_every=1, sample=sample, **LONG)
    run = RunFolder.open(tmp_path / "stopped")
    assert run.load_checkpoint().step == 5
    assert not (tmp_path / "stopped" / ".lock").exists()


def test_in_another_thread_a_run_installs_no_handlers(start: Start) -> None:
    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool:
        result: TrainResult = pool.submit(start, steps=1).result()
    assert result.finished
    assert signal.getsignal(signal.SIGINT) is before

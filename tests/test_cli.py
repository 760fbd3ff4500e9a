"""The command `et`: what it understands, what it refuses in one line, and what it leaves alone."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints
from unittest import mock

import numpy as np
import pytest
import torch

from cases import et, write_text
from expert_threshold import full_run
from expert_threshold.analysis.figures import FIGURES
from expert_threshold.cli import COMMANDS, main
from expert_threshold.cli import analyze as analyze_command
from expert_threshold.cli import calibrate as calibrate_command
from expert_threshold.cli import compare as compare_command
from expert_threshold.cli import evaluate as evaluate_command
from expert_threshold.cli import export as export_command
from expert_threshold.cli import generate as generate_command
from expert_threshold.cli import import_ as import_command
from expert_threshold.cli import plan as plan_command
from expert_threshold.cli import recipes as recipes_command
from expert_threshold.cli import serve as serve_command
from expert_threshold.cli import sweep as sweep_command
from expert_threshold.cli import train as train_command
from expert_threshold.cli import upcycle as upcycle_command
from expert_threshold.cli.options import Command, Option, parse, parse_value, show
from expert_threshold.cli.run_options import parse_run, resolve_run, run_groups
from expert_threshold.config import RUNS, SECTIONS, RunConfig, resolve
from expert_threshold.files import new_folder
from expert_threshold.generate import Step
from expert_threshold.moe import BACKENDS
from expert_threshold.moe.backends import BY_NAME
from expert_threshold.option import Bounds, Count, alternatives, describe
from expert_threshold.recipes import methods
from expert_threshold.routing import RULES, ExpertThreshold, TokenChoice, option
from expert_threshold.runs import RunFolder
from expert_threshold.train import train_step
from expert_threshold.train.budget import SHARE_OF_STEPS

RUN_OPTIONS = [option for group in run_groups(resolve()).values() for option in group]
DECIDED = compare_command.decided()
OPTIONS: dict[str, list[Option]] = {
    "train": [*train_command.OPTIONS, *RUN_OPTIONS],
    "plan": [*plan_command.OPTIONS, *RUN_OPTIONS],
    "generate": generate_command.OPTIONS,
    "data": [],  # test_data_command.py has them
    "evaluate": evaluate_command.OPTIONS,
    "analyze": analyze_command.OPTIONS,
    "calibrate": calibrate_command.OPTIONS,
    "upcycle": upcycle_command._options(),
    "export": export_command.OPTIONS,
    "serve": [*serve_command.OPTIONS, *serve_command.LIMITS],
    "import": import_command.OPTIONS,
    "recipes": recipes_command.OPTIONS,
    "compare": [
        *compare_command.OPTIONS,
        *(option for option in RUN_OPTIONS if (option.key or option.name) not in DECIDED),
    ],
    "sweep": [
        *sweep_command.OPTIONS,
        *(option for option in RUN_OPTIONS if (option.key or option.name) not in DECIDED),
    ],
}
TEXT = "the cat sat on a mat and saw another cat by the old river where all the other cats lived "


def content(folder: Path) -> dict[str, str]:
    """The hash of every file and the name of every folder below `folder`."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def unwrapped(help_text: str) -> str:
    """Without the line ends."""
    return " ".join(help_text.split())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of forty documents."""
    return write_text(tmp_path_factory.mktemp("text") / "corpus.jsonl", TEXT, documents=40, words=200)


@pytest.fixture(scope="module")
def small(text: Path) -> list[object]:
    """Options of a run that takes no time."""
    sizes = ["--vocab-size", 280, "--batch-size", 2, "--context", 64]
    return ["tiny", "--data", text, *sizes, "--eval-tokens", 128, "--threads", 1]


@pytest.fixture(scope="module")
def run(small: list[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. No test may change it."""
    path = tmp_path_factory.mktemp("runs") / "run"
    with contextlib.redirect_stdout(io.StringIO()):
        code = et(
            "train",
            *small,
            "--steps",
            4,
            "--eval-every",
            4,
            "--sample-every",
            4,
            "--checkpoint-every",
            2,
            "--out",
            path,
        )
    assert code == 0
    return path


def test_a_run_of_some_minutes_has_the_steps_that_fit(
    small: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("expert_threshold.train.pace._seconds_of_step", lambda state: train_step(state) and 0.5)
    monkeypatch.setattr("expert_threshold.train.pace.SECONDS", 0)
    monkeypatch.setattr("expert_threshold.train.timer.now", lambda: 0.0)  # no time goes by: nothing is decided again
    monkeypatch.setattr("expert_threshold.train.budget.ENOUGH", 1000)
    assert et("train", *small, "--minutes", 0.1, "--out", tmp_path / "run") == 0
    config = RunFolder.open(tmp_path / "run").config
    assert config["train"]["steps"] == round(6 / 0.5 * SHARE_OF_STEPS)
    assert config["model"]["rule"]["warmup_steps"] == config["train"]["steps"] // 5  # of the run as it became
    assert config["time"] == {"minutes": 0.1, "decisions": []}


@pytest.mark.parametrize("options", [("--minutes", 0), ("--minutes=-1",), ("--minutes", 1, "--steps", 3)])
def test_nonsense_minutes_are_refused_and_leave_nothing(
    options: tuple[object, ...], small: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert et("train", *small, *options, "--out", tmp_path / "run") == 2
    assert re.match("et train: (--minutes: expected|minutes=1.0 )", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [["train", "--init-from"], ["sweep"], ["plan"]], ids=" ".join)
def test_a_file_whose_section_is_no_object_is_refused(
    command: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """et sweep and --init-from looked into the section first, and ended with a traceback."""
    (tmp_path / "odd.json").write_text('{"model": 5, "train": 5}')
    of_run = [run] if "--init-from" in command else []
    assert et(*command, *of_run, "--config", tmp_path / "odd.json") == 2
    told = f"--config {tmp_path / 'odd.json'}: section 'model' must be an object of options, not 5"
    assert capsys.readouterr().err == f"et {command[0]}: {told}\n"


def test_minutes_beside_the_steps_of_a_file_are_refused_before_anything_is_measured(
    small: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line named tokens, which nobody had given."""
    (tmp_path / "steps.json").write_text('{"train": {"steps": 9}}')
    options = ["--config", tmp_path / "steps.json", "--minutes", 1, "--out", tmp_path / "runs" / "run"]
    assert et("train", *small, *options) == 2
    told = "et train: minutes=1.0 and steps=9 both say how long to train; give one of them\n"
    assert capsys.readouterr() == ("", told)
    assert not (tmp_path / "runs").exists()


def test_help_tells_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert et("--help") == 0
    text = capsys.readouterr().out
    for name, entry in COMMANDS.items():
        assert f"et {name} " in text
        assert entry.summary in text
    assert et("--version") == 0
    assert capsys.readouterr().out.startswith("expert-threshold ")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_option_with_its_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert et(command, "--help") == 0
    text = unwrapped(capsys.readouterr().out)
    assert text.startswith(f"usage: et {command}")
    for offered in OPTIONS[command]:
        assert offered.flag in text
        assert offered.help
        assert " ".join(offered.help.split()) in text, offered.flag
        assert offered.required or f"(default: {show(offered.default)})" in text


def help_of(option: Option, text: str) -> str:
    """Return the help of one option as one line."""
    lines = text.splitlines()
    name = re.compile(rf"  {option.flag}(?![\w-])")
    first = next(number for number, line in enumerate(lines) if name.match(line))
    rest = itertools.takewhile(lambda line: not line.startswith("  --"), lines[first + 1 :])
    return " ".join([lines[first], *rest])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_value_that_has_a_name(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--dispatch told of three of its five names, PRESET of its default alone, and --recipe broke names in two."""
    assert et(command, "--help") == 0
    text = capsys.readouterr().out
    for offered in OPTIONS[command]:
        if names := {name for name in alternatives(offered.kind) if isinstance(name, str)}:
            assert names <= set(re.split(r"[^\w-]+", help_of(offered, text))), offered.flag


def test_help_lists_the_names_that_stand_in_lists(capsys: pytest.CaptureFixture[str]) -> None:
    for command, names in (("compare", list(methods())), ("analyze", [study.name for study in FIGURES])):
        et(command, "--help")
        assert set(names) <= set(re.split(r"[^\w-]+", capsys.readouterr().out))


def test_dispatch_is_chosen_among_all_there_are() -> None:
    kind = next(option.kind for option in RUN_OPTIONS if option.name == "dispatch")
    assert set(alternatives(kind)) == set(BY_NAME)


def test_an_option_that_is_any_text_refuses_none() -> None:
    """Options that take a few names have a type that lists them; --help and errors are made from it."""
    for section, record in SECTIONS.items():
        for name, kind in get_type_hints(record).items():
            if str in alternatives(kind) and name != "windows":  # a pattern, which says so itself
                resolve("tiny", changes={section: {name: "no-such-name"}})


def test_help_shows_the_defaults_of_the_chosen_preset_and_rule(capsys: pytest.CaptureFixture[str]) -> None:
    et("plan", "d12", "--rule", "token_choice", "--seed", 17, "--help")
    text = unwrapped(capsys.readouterr().out)
    for default in ("19073", "65536", "token_choice", "17"):
        assert f"(default: {default})" in text


def test_no_two_options_of_a_run_share_a_name() -> None:
    names = [option.name for option in OPTIONS["train"]]
    assert len(set(names)) == len(names)


@dataclass(frozen=True)
class Clashing(TokenChoice):
    """A rule whose options are named like others."""

    seed: int = option(5, "Draws the routers.")
    out: int | None = option(None, "none is no help.")
    decay: float = option(1.0, "Exponent of the gates.")


def test_an_option_of_a_rule_with_the_name_of_another_one_is_typed_with_a_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--seed was the run's alone, and the rule's could not be given."""
    monkeypatch.setitem(RULES._rules, "clashing", Clashing)  # type: ignore[attr-defined]
    arguments = ["tiny", "--rule", "clashing", "--seed", "7", "--rule-seed", "9", "--rule_out", "none"]
    config = resolve_run(parse_run("et train", "", train_command.OPTIONS, arguments))
    assert config.model.rule == Clashing(seed=9)
    assert config.train.seed == 7
    assert et("train", "--rule", "clashing", "--help") == 0
    text = unwrapped(capsys.readouterr().out)
    assert "--rule-seed INT Draws the routers. (clashing) (default: 5)" in text
    assert "--rule-out INT|none none is no help. (clashing) (default: none)" in text


def test_help_describes_each_rules_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    """The first rule's help once stood for every rule's option of that name."""
    assert et("plan", "--help") == 0
    text = unwrapped(capsys.readouterr().out)
    assert "--num-experts INT Routed experts in a layer. (default: 16)" in text
    assert "expert_choice: Tokens that compete for an expert" in text
    assert "quantile_balancing: Tokens over which quantiles are taken" in text


@pytest.mark.parametrize("preset", RUNS)
@pytest.mark.parametrize("rule", ["expert_threshold", "token_choice", "dense"])
def test_every_default_can_be_typed_as_it_is_shown(preset: str, rule: str) -> None:
    for group in run_groups(resolve(preset, rule)).values():
        for offered in group:
            if offered.kind is not bool:
                assert parse_value(offered.kind, show(offered.default)) == offered.default


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, "12", 12),
        (float, "1e-3", 0.001),
        (float | None, "none", None),
        (float | None, "0.5", 0.5),
        (Literal["none", "aux"], "none", "none"),
        (Literal["batch", "global"] | int, "global", "global"),
        (Literal["batch", "global"] | int, "64", 64),
        (tuple[float, float], "0.8,0.9", (0.8, 0.9)),
        (tuple[float, float] | None, "0.8,0.9", (0.8, 0.9)),
        (tuple[float, float] | None, "none", None),
        (str, "none", "none"),
        (str | None, "none", None),
        (str | None, "some", "some"),
        (bool | float, "false", False),  # an option of two rules
        (bool | float, "0.5", 0.5),
    ],
)
def test_values_are_read(kind: Any, text: str, value: object) -> None:
    assert parse_value(kind, text) == value


@pytest.mark.parametrize("text", ["", "x", "1.5", "nan", "none"])
def test_a_whole_number_is_nothing_else(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}$"):
        parse_value(int, text)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "x"])
def test_a_number_is_finite(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}$"):
        parse_value(float, text)


def test_types_are_described_in_words() -> None:
    assert describe(int) == "a whole number"
    assert describe(float | None) == "a number or none"
    assert describe(tuple[float, float]) == "2 numbers such as 0.9,0.9"
    assert describe(Count | None) == "a whole number of at least 1 or none"
    assert describe(Annotated[float, Bounds(above=0, most=60)]) == "a number above 0 and at most 60"


def test_flags_set_what_they_name() -> None:
    arguments = "tiny --pool 128 --capacity-slack none --no-debias --softcap=none --gate-norm fanout --betas 0.8,0.9"
    given = parse_run("et plan", "", [], [*arguments.split(), "--eval-every", "none", "--d_model", "128"])
    config = resolve_run(given)
    rule = config.model.rule
    assert isinstance(rule, ExpertThreshold)
    assert (rule.pool, rule.capacity_slack, rule.debias) == (128, None, False)
    assert (config.model.softcap, config.model.gate_norm, config.model.d_model) == (None, "fanout", 128)
    assert (config.optim.betas, config.train.eval_every) == ((0.8, 0.9), None)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prompt=--x"],
        ["--prompt="],
        ["--prompt", ""],
        ["--prompt", "- x = 1"],
        ["--prompt", "--max_tokens is an option"],
        ["--prompt=--max_tokens=3"],
    ],
)
def test_a_prompt_may_be_any_text(arguments: list[str]) -> None:
    command = Command("et generate", "", {"generate": generate_command.OPTIONS})
    text = arguments[-1].removeprefix("--prompt=")
    assert parse(command, ["run", *arguments, "--seed", "-1"]) == {"run": "run", "prompt": text, "seed": -1}


def test_flags_go_before_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "options.json"
    file.write_text('{"train": {"steps": 7, "batch_size": 3}, "model": {"rule": {"name": "dense"}}}')
    assert et("plan", "tiny", "--config", file, "--batch-size", 5, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["preset"], plan["config"]) == ("tiny", str(file))
    assert (plan["steps"], plan["tokens_per_step"], plan["rule"]) == (7, 5 * 128, "dense")


def test_a_plan_of_a_file_alone_claims_no_preset(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert et("plan", "--config", run / "config.json", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert "preset" not in plan
    assert plan["config"] == str(run / "config.json")
    assert et("plan", "--config", run / "config.json") == 0
    assert "quickstart" not in capsys.readouterr().out


def test_training_prints_its_plan_and_the_next_command(
    small: list[object], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a run"
    assert et("train", *small, "--steps", 2, "--sample-every", 2, "--out", out) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "rule expert_threshold among 16 experts" in shown.out
    assert "2 steps of 128 tokens" in shown.out
    assert ", 1 thread\n" in shown.out
    assert "bits per byte" in shown.out
    assert "prompt 'def '" in shown.out
    (last,) = (line for line in shown.out.splitlines() if line.startswith("next: "))
    program, command, folder, flag, prompt = shlex.split(last.removeprefix("next: "))
    assert (program, command, folder, flag) == ("et", "generate", str(out), "--prompt")
    assert prompt in text.read_text()  # after a run on prose it was 'def '
    assert [path.name for path in (out / "samples").iterdir()] == ["step_000002.txt"]
    assert f"report: {out / 'report.html'}" in shown.out
    assert "<h1>Expert threshold (ET" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("drawn")
def test_a_report_that_fails_loses_nothing_but_itself(
    small: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "run"
    assert et("train", *small, "--steps", 1, "--out", out) == 0
    shown = capsys.readouterr()
    (warning,) = (line for line in shown.out.splitlines() if line.startswith("warning"))
    assert warning.startswith("warning: no report was written: figures need matplotlib")
    assert "report: " not in shown.out
    assert f"next: et generate {out}" in shown.out
    assert RunFolder.open(out).latest_checkpoint() == 1
    assert not (out / "report.html").exists()


def test_the_config_of_a_run_repeats_it(run: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert et("train", "--config", run / "config.json", "--out", again) == 0
    model = RunFolder.open(run).load_checkpoint().tensors["model"]
    repeated = RunFolder.open(again).load_checkpoint().tensors["model"]
    assert all(torch.equal(model[name], repeated[name]) for name in model)


def test_a_run_is_resumed_from_its_folder_alone(small: list[object], run: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    shutil.copytree(run, part)
    shutil.rmtree(part / "checkpoints" / "step_000004")
    assert et("train", "--resume", part, "--log-every", 1) == 0
    assert (
        content(part)["checkpoints/step_000004/model.safetensors"]
        == content(run)["checkpoints/step_000004/model.safetensors"]
    )


def test_a_run_whose_text_lies_elsewhere_is_resumed(
    small: list[object], run: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = Path(shutil.copytree(run, tmp_path / "part"))
    shutil.rmtree(part / "checkpoints" / "step_000004")
    config = json.loads((part / "config.json").read_text())
    config["data"]["source"] = str(tmp_path / "gone")
    (part / "config.json").write_text(json.dumps(config))
    before = content(part)
    assert_refused(capsys, et("train", "--resume", part), f"{tmp_path / 'gone'} does not exist", "--data")
    other = tmp_path / "other.jsonl"
    other.write_text("".join(text.read_text().splitlines(keepends=True)[1:]))
    assert_refused(capsys, et("train", "--resume", part, "--data", other), "has changed", "--data")
    assert content(part) == before
    assert et("train", "--resume", part, "--data", text) == 0
    assert RunFolder.open(part).config["data"] == RunFolder.open(run).config["data"]
    path = "checkpoints/step_000004/model.safetensors"
    assert content(part)[path] == content(run)[path]


def test_a_run_without_its_checkpoints_is_not_trained_again(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    shutil.rmtree(copy / "checkpoints")
    before = content(copy)
    assert_refused(capsys, et("train", "--resume", copy), f"{copy / 'checkpoints'}: is missing or empty", "copy")
    assert content(copy) == before
    (copy / "report.html").unlink()  # as a run that was killed before its first checkpoint
    assert et("train", "--resume", copy) == 0
    assert content(copy)["checkpoints/step_000004/model.safetensors"]


def test_a_resumed_run_tells_that_it_keeps_its_threads(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    assert et("train", "--resume", copy) == 0
    assert "as before" not in capsys.readouterr().out
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert et("train", "--resume", copy) == 0
    assert "note: 1 thread, as before, for equal rounding; --threads 16 uses 16" in capsys.readouterr().out
    assert et("train", "--resume", copy, "--threads", 1) == 0
    assert "as before" not in capsys.readouterr().out


def test_a_run_begins_with_another_ones_model(text: Path, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "next"
    options = ["--data", text, "--batch-size", 2, "--steps", 1, "--seed", 5, "--rule", "token_choice", "--threads", 1]
    assert et("train", "tiny", "--init-from", run, *options, "--out", out) == 0
    config = RunConfig.from_dict(RunFolder.open(out).config)
    assert config.model.context == 64
    assert config.model.rule == TokenChoice()
    assert RunFolder.open(out).config["init_from"] == str(run)


def test_a_run_begun_from_another_has_warmup_and_decay_of_its_own_length(tmp_path: Path) -> None:
    """It had those of the other run's length, and the other run's steps behind it."""
    first = tmp_path / "first"
    RunFolder.create(first).write_config(resolve("d12").to_dict())

    def rule(*arguments: object) -> ExpertThreshold:
        given = parse_run("et train", "", train_command.OPTIONS, list(map(str, [*arguments, "--init-from", first])))
        found = resolve_run(given).model.rule
        assert isinstance(found, ExpertThreshold)
        return found

    of_first, anew = resolve("d12").model.rule, rule("--steps", 500)
    assert isinstance(of_first, ExpertThreshold)
    assert (anew.warmup_steps, anew.decay, anew.estimator) == (100, 0.9619, "mean")
    assert rule("--steps", 500, "--continue-warmup") == of_first
    assert rule("--steps", 500, "--warmup-steps", 30, "--decay", 0.5).warmup_steps == 30
    with pytest.raises(ValueError, match="warmup_steps=600 is beyond the run of 500 steps"):
        rule("--steps", 500, "--warmup-steps", 600)


def test_the_folder_of_a_run_is_named_after_preset_and_rule(
    small: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert et("train", *small, "--steps", 1, "--rule", "dense") == 0
    assert (tmp_path / "runs" / "tiny-dense" / "config.json").is_file()


def test_generation_repeats_itself_under_a_seed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in (1, 1, 2):
        assert et("generate", run, "--prompt", "the cat", "--max-tokens", 20, "--seed", seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("the cat") for text in texts)


def test_generation_shows_where_tokens_went(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", run, "--prompt", "the [cat]", "--max-tokens", 20, "--seed", 1]
    assert et(*arguments) == 0
    plain = capsys.readouterr().out
    assert et(*arguments, "--show-routing") == 0
    legend, _, text = capsys.readouterr().out.partition("\n")
    assert legend.startswith("routed experts per layer")
    assert text == plain


@pytest.mark.parametrize("routing", [False, True])
@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_gets_no_orders_from_a_model(
    terminal: bool,
    routing: bool,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = Step(0, "a\x1b[2Jb", 0.0, "length", () if routing else None)
    monkeypatch.setattr(generate_command, "generate", lambda *_, **__: iter([step]))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "dumb")
    assert et("generate", run, "--prompt", "p", *(["--show-routing"] if routing else [])) == 0
    assert ("pa\\x1b[2Jb" if terminal else "pa\x1b[2Jb") in capsys.readouterr().out


@pytest.mark.parametrize("routing", [False, True])
def test_spaces_and_other_characters_are_printed_as_they_come(
    routing: bool, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = ["a", "\t", "b\r\n", "\x0b", " c "]
    steps = [Step(0, piece, 0.0, None, () if routing else None) for piece in pieces]
    monkeypatch.setattr(generate_command, "generate", lambda *_, **__: iter(steps))
    assert et("generate", run, "--prompt", "\tp", *(["--show-routing"] if routing else [])) == 0
    assert capsys.readouterr().out.endswith("\tpa\tb\r\n\x0b c \n")


def test_a_prompt_that_is_not_utf_8_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert et("generate", run, "--show-routing", "--prompt", "a\udcff") == 2
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "et generate: --prompt 'a\\udcff' is not UTF-8; give a text in UTF-8\n")


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# What is typed, and what the one line has to say: the option or the file, and what to do about it.
USAGE: list[tuple[str, list[str]]] = [
    ("", ["name a command", "et --help"]),
    ("tarin", ["unknown command tarin", "did you mean train?"]),
    ("xyz", ["unknown command xyz", "there are train, plan, generate"]),
    ("train --stepz 3", ["unknown option --stepz", "did you mean --steps?"]),
    ("train --zzzzzz 3", ["unknown option --zzzzzz", "see et train --help"]),
    ("train --steps", ["--steps: expected one argument", "see et train --help"]),
    ("generate . --prompt --foo", ["--prompt: expected one argument", "see et generate --help"]),
    ("generate . --prompt --seed 3", ["--prompt: expected one argument", "see et generate --help"]),
    ("generate . --prompt", ["--prompt: expected one argument", "see et generate --help"]),
    (
        "generate . --prompt -x",
        ["--prompt: expected one argument; write --prompt=VALUE for a value that begins with -"],
    ),
    ("train --steps --foo", ["--steps: expected one argument", "see et train --help"]),
    ("train --out --seed 3", ["--out: expected one argument", "see et train --help"]),
    ("train --no-debias=yes", ["--no-debias", "ignored explicit argument 'yes'"]),
    ("train --nope", ["unknown option --nope; see et train --help"]),  # not close to --p
    ("train -steps 3", ["unknown option -steps", "did you mean --steps?"]),
    ("train --steps many", ["--steps: expected a whole number of at least 1, not many"]),
    ("train --steps 0", ["--steps: expected a whole number of at least 1, not 0"]),
    ("train --rule expert_treshold", ["--rule: expected dense", "not expert_treshold; did you mean expert_threshold?"]),
    ("train quickstar", ["preset 'quickstar' is unknown; did you mean quickstart?"]),
    ("train tiny d12", ["unexpected d12", "see et train --help"]),
    ("train --matrix-lr nan", ["--matrix-lr: expected a number above 0 and below 1e+30, not nan"]),
    ("train --matrix-lr -1", ["--matrix-lr: expected a number above 0", "not -1"]),
    ("train --betas 0.9", ["--betas: expected 2 numbers such as 0.9,0.9, each of at least 0 and below 1, not 0.9"]),
    ("train --gate-norm fanuot", ["--gate-norm: expected fanout or none, not fanuot; did you mean fanout?"]),
    ("train --dispatch fast", ["dispatch", "reference"]),
    ("train --device gpu", ["--device: expected auto, cpu, cuda", "not gpu"]),
    ("train --track wandb", ["--track: expected none, tensorboard", "not wandb"]),
    ("train --rule token_choice --pool batch", ["pool", "token_choice", "expert_choice or expert_threshold"]),
    ("train --rule dense --num-experts 4", ["num_experts", "dense", "leave it out"]),
    ("train --rule expert_choice --balance aux", ["balance", "expert_choice", "token_choice"]),
    ("train --rule token_choice --experts-per-token 1.5", ["experts_per_token=1.5", "must be a whole number"]),
    ("train --heads 3", ["heads=3", "d_model"]),
    ("train --config missing.json", ["--config missing.json", "no such file"]),
    ("train --resume missing", ["missing", "no such run folder"]),
    ("train --init-from missing", ["missing", "no such run folder"]),
    ("train --continue-warmup", ["--continue-warmup", "--init-from"]),
    ("train --data missing", ["missing", "does not exist"]),
    ("generate", ["arguments are required: RUN", "see et generate --help"]),
    ("generate missing", ["missing", "no such run folder"]),
    ("plan --steps 9223372036854775808", ["not 9223372036854775808; numbers must be below 2**63"]),
    ("generate . --top-k many", ["--top-k: expected a whole number or none, not many"]),
    ("train --d-model 31", ["d_model=31 cannot be divided into heads", "a multiple of that"]),
    ("train --d-model 1000", ["d_model=1000 cannot be divided into heads"]),
    ("train --d-model 0", ["--d-model: expected a whole number of at least 1, not 0"]),
    ("compare --rules dense,dense", ["--rules dense,dense: dense is named twice"]),
    ("compare --rules dense,", ["--rules dense,: a name is missing at a comma"]),
    ("compare --rules dence", ["--rules dence: unknown; did you mean dense?"]),
    ("compare --rules all,dense", ["--rules all: unknown; there are dense, token_choice"]),
    ("compare --seeds 0", ["--seeds: expected a whole number of at least 1, not 0"]),
    ("compare --eval-every none", ["--eval-every none"]),
    ("compare --rule dense", ["unknown option --rule; did you mean --rules?"]),
    ("analyze . --figures warmup,warmup", ["--figures warmup,warmup: warmup is named twice"]),
    ("analyze . --figures warm", ["--figures warm: unknown; did you mean warmup?"]),
    ("analyze . --tokens 1", ["--tokens: expected a whole number of at least 2, not 1"]),
    ("analyze . --gsm8k missing", ["--gsm8k missing: does not exist"]),
    ("analyze . --domain novels", ["--domain novels: expected NAME=SOURCE"]),
    ("analyze . --domain start=embedded", ["--domain start=embedded: the name start is taken"]),
    ("analyze . --domain a=code --domain a=embedded", ["--domain a=embedded: the name a is taken"]),
    ("analyze . --human-eval missing", ["--human-eval missing: does not exist"]),
    ("evaluate missing --rates a,b", ["--rates a,b: expected numbers"]),
    ("evaluate missing --rates 1,1", ["--rates 1,1: 1 is named twice"]),
    ("evaluate missing", ["missing: no such run folder"]),
    ("evaluate missing --eval-tokens 0", ["--eval-tokens: expected a whole number of at least 1 or none, not 0"]),
    ("train --layers 1000000", ["--layers: expected a whole number of at least 1 and at most 1000, not 1000000"]),
    ("data", ["name a subcommand: fineweb-edu"]),
    ("data tokenizer missing", ["missing does not exist"]),
    ("data tokenizer missing --vocab-size 5", ["vocab_size=5 is too small"]),
    ("export missing --to there", ["missing: no such run folder"]),
    ("export .", ["arguments are required: --to"]),
    ("import missing", ["missing: no config.json"]),
    ("calibrate missing --to there", ["missing: no such run folder"]),
    ("upcycle missing --to there", ["missing: no such run folder"]),
    ("recipes all", ["unexpected all"]),
    ("serve missing", ["missing: no such run folder"]),
    ("evaluate missing --rates 1 --bundle x", ["--rates 1: measures the validation loss alone; leave --bundle out"]),
    ("evaluate missing --rates 1 --max-per-task 3", ["--rates 1", "leave --max-per-task out"]),
    ("train --minutes 1e300", ["--minutes: expected a number above 0 and below 10000000.0 or none, not 1e300"]),
    ("sweep --trials 1000000000", ["--trials: expected a whole number of at least 1 and at most 100000"]),
    ("plan --utilisation 1e-200 --peak-tflops 1e-200", ["--peak-tflops 1e-200: the run would never end"]),
    ("plan d20 --price-per-gpu-hour 1e308", ["--price-per-gpu-hour 1e+308: the cost is beyond counting"]),
    ("plan --gpus 0", ["--gpus: expected a whole number of at least 1, not 0"]),
    ("plan --rule best", ["--rule: expected dense, token_choice, expert_choice", "not best"]),
]


@pytest.mark.parametrize(("line", "parts"), USAGE, ids=[line or "nothing" for line, _ in USAGE])
def test_a_line_that_cannot_be_understood_is_refused_in_one_line(
    line: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(capsys, et(*line.split()), *parts)
    assert not [path for path in tmp_path.rglob("*") if path.name != "runs"]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (command, option)
        for command, options in OPTIONS.items()
        for option in options
        if str in alternatives(option.kind) and not option.may_be_empty
    ],
    ids=lambda value: value if isinstance(value, str) else value.flag,
)
def test_an_empty_text_is_refused_by_the_name_that_was_typed(
    command: str, option: Option, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty --rules was called an unknown method, an empty RUN a folder without a name, an empty --to the one that
    is there already."""
    monkeypatch.chdir(tmp_path)
    typed = "" if option.positional else f"{option.flag}="
    others = [f"{other.flag}=x" for other in OPTIONS[command] if other.required and not other.positional]
    assert_refused(capsys, et(command, *others, typed), f"{option.flag}: must not be empty")
    assert not list(tmp_path.iterdir())


def test_a_narrow_model_has_one_head(capsys: pytest.CaptureFixture[str]) -> None:
    """--d-model 30 was refused as heads=0, which nobody had typed."""
    assert et("plan", "quickstart", "--d-model", 30, "--json") == 0
    assert resolve_run(parse_run("et plan", "", [], ["--d-model", "30"])).model.heads == 1


def test_a_tokenizer_for_a_text_file_needs_out(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text itself was called a cache folder that cannot be written."""
    assert_refused(capsys, et("data", "tokenizer", text, "--vocab-size", 300), "--out is missing", "is a file")


def assert_refused(capsys: pytest.CaptureFixture[str], code: int, *parts: str) -> None:
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("et")
    assert error.count("\n") == 1
    assert error.endswith("\n")
    for part in parts:
        assert part in error


@pytest.mark.parametrize(
    ("name", "data", "options", "parts"),
    [
        ("empty.txt", b"", [], ["empty.txt", "has no documents: put some text into it"]),
        ("latin.txt", "caf\xe9 ".encode("latin-1") * 99, [], ["latin.txt", "UTF-8"]),
        ("a.jsonl", b'{"body": "x"}\n', [], ["a.jsonl", "text"]),
        ("a.jsonl", b"no json\n", [], ["a.jsonl"]),
        ("a.parquet", b"no parquet", [], ["a.parquet"]),
        ("a.csv", b"a,b", [], ["a.csv", ".parquet"]),
        ("a.jsonl", b'{"text": "x"}\n' * 9, ["--text-field", "body"], ["a.jsonl", "body"]),
        (
            "a.jsonl",
            b'{"text": "x"}\n' * 9,
            [],
            ["no documents left for train", "give more documents with different texts"],
        ),
    ],
)
def test_data_that_cannot_be_read_is_refused_and_nothing_is_made(
    name: str,
    data: bytes,
    options: list[str],
    parts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path / name, data)
    before = content(tmp_path)
    assert_refused(capsys, et("train", "tiny", "--data", path, *options, "--out", tmp_path / "run"), *parts)
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--vocab-size", 10], ["10", "25"]),
        (["--experts-per-token", 0.01, "--pool", "sequence"], ["k", "experts_per_token"]),
        (["--rule", "expert_choice", "--pool", 100], ["pool", "100"]),
        (["--threads", 100_000], ["threads=100000", "at most"]),
    ],
    ids=["a vocabulary too small", "k = 0", "a pool that does not divide the batch", "threads beyond all machines"],
)
def test_a_run_that_cannot_train_is_refused_and_nothing_is_made(
    options: list[object],
    parts: list[str],
    small: list[object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert_refused(capsys, et("train", *small, *options, "--out", tmp_path / "run"), *parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train", "--out", "RUN"], ["--out", "already exists", "--resume"]),
        (["train", "--resume", "RUN", "--steps", 1], ["steps=1 is not above", "give more"]),
        (["train", "--resume", "RUN", "--steps", 9, "--minutes", 1], ["steps=9 and minutes=1.0 all say how long"]),
        (["train", "d12", "--resume", "RUN"], ["PRESET d12", "leave it out"]),
        (["train", "--resume", "RUN", "--rule", "dense"], ["--rule dense", "leave it out"]),
        (["train", "--resume", "RUN", "--out", "x"], ["--out x", "leave it out"]),
        (["train", "--resume", "RUN", "--no-debias"], ["et train: --no-debias is decided", "leave it out"]),
        (["train", "--init-from", "RUN", "--layers", 3, "--out", "x"], ["layers=3", "--init-from"]),
        (["generate", "RUN", "--step", 3], ["no checkpoint of step 3", "2, 4"]),
        (["generate", "RUN", "--temperature", "-1"], ["temperature=-1.0", "at least 0"]),
        (["generate", "RUN", "--max-tokens", 0], ["max_tokens=0", "at least 1"]),
        (["generate", "RUN", "--prompt", "the cat " * 99], ["prompt", "shorten it"]),
    ],
)
def test_what_does_not_fit_a_run_is_refused_and_the_run_unharmed(
    arguments: list[object],
    parts: list[str],
    run: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    before = content(run)
    data = ["--data", text] if "--init-from" in arguments else []
    assert_refused(capsys, et(*(run if argument == "RUN" else argument for argument in arguments), *data), *parts)
    assert content(run) == before
    assert not list(tmp_path.iterdir())


def flip_a_byte(run: Path) -> None:
    path = run / "checkpoints" / "step_000004" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def make_the_checkpoint_foreign(run: Path) -> None:
    (run / "checkpoints" / "step_000004" / "manifest.json").write_text('{"format": "pt", "files": {}}')


def make_foreign(run: Path) -> None:
    (run / "config.json").write_text('{"model_type": "llama"}')


def lose_the_tokenizer(run: Path) -> None:
    (run / "tokenizer.json").unlink()


def damage_the_model(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"model": 5}))


def damage_the_rule(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"model": config["model"] | {"rule": None}}))


def change(run: Path, name: str, value: object) -> None:
    """Change an option of the run's model."""
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"model": config["model"] | {name: value}}))


@pytest.mark.parametrize(
    "command",
    [
        "train --resume RUN",
        "train tiny --init-from RUN --out new",
        "generate RUN",
        "calibrate RUN --to new",
        "upcycle RUN --to new",
    ],
)
def test_an_option_that_is_none_is_told_with_the_file_that_has_it(
    command: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = Path(shutil.copytree(run, tmp_path / "RUN"))
    change(copy, "d_model", "x")
    before = content(tmp_path)
    assert_refused(capsys, et(*command.split()), "RUN/config.json: d_model='x' must be a whole number of at least 1")
    assert content(tmp_path) == before


def test_so_is_one_of_an_export(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exported = tmp_path / "exported"
    assert et("export", run, "--to", exported) == 0
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(config | {"d_model": "x"}))
    told = f"{exported / 'config.json'}: d_model='x' must be a whole number of at least 1"
    assert_refused(capsys, et("import", exported, "--out", tmp_path / "new"), told)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("options", [[], ["--rates", "1"]], ids=["evaluate", "at rates"])
def test_a_text_that_is_gone_is_told_with_the_run_that_needs_it(
    options: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The remedy was one of `et train`: another text."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    config = json.loads((copy / "config.json").read_text())
    config["data"]["source"] = str(tmp_path / "gone.txt")
    (copy / "config.json").write_text(json.dumps(config))
    told = [f"{copy}: its text cannot be read ({tmp_path / 'gone.txt'} does not exist", "; restore it, or "]
    assert_refused(capsys, et("evaluate", copy, *options), *told)


def test_a_run_from_before_key_offset_had_layers_goes_on(
    small: list[object], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    change(copy, "key_offset", False)
    assert et("train", "--resume", copy) == 0
    assert et("train", *small, "--init-from", copy, "--steps", 1, "--out", tmp_path / "next") == 0
    assert et("plan", "--config", copy / "config.json", "--json") == 0
    for before, now in ((True, "all"), (False, None)):
        assert resolve(file={"model": {"key_offset": before}}).model.key_offset == now
    with pytest.raises(ValueError, match="key_offset=1 must be last, all or none"):
        resolve(file={"model": {"key_offset": 1}})


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"name": "expert_threshold", "num_experts": "4"}, "num_experts='4' must be a whole number"),
        (
            {"name": "token_choice", "pool": "batch"},
            "pool: rule token_choice has no such option; leave it out, or use ",
        ),
        ({"name": "dense", "pool": "batch"}, "pool: rule dense has no such option; leave it out, or use "),
    ],
)
def test_a_rule_s_option_that_is_none_is_told_with_its_file(
    rule: dict[str, object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "file.json", json.dumps({"model": {"rule": rule}}))
    assert_refused(capsys, et("plan", "--config", path), f"--config {path}: {message}")


def test_options_of_a_file_s_rule_may_need_those_that_are_typed(tmp_path: Path) -> None:
    rule = {"name": "expert_threshold", "experts_per_token": 32, "num_experts": 16.0}
    path = write(tmp_path / "file.json", json.dumps({"model": {"rule": rule}}))
    assert et("plan", "--config", path, "--num-experts", 64, "--json") == 0


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (damage_the_model, ["section 'model'"]),
        (damage_the_rule, ["rule=None must be an object"]),
        (flip_a_byte, ["model.safetensors", "step"]),
        (make_the_checkpoint_foreign, ["manifest.json", "not a checkpoint of expert-threshold", "step_000002"]),
        (make_foreign, ["config.json", "not written by expert-threshold"]),
        (lose_the_tokenizer, ["tokenizer.json", "missing"]),
    ],
)
@pytest.mark.parametrize("arguments", [["generate"], ["train", "--resume"]], ids=["generate", "resume"])
def test_a_damaged_run_is_reported_and_left_as_it_is(
    arguments: list[str],
    damage: Callable[[Path], None],
    parts: list[str],
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    damage(copy)
    before = content(copy)
    assert_refused(capsys, et(*arguments, copy), *parts)
    assert content(copy) == before


def test_a_full_disk_is_reported_and_what_was_saved_stays(
    small: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = RunFolder.save_checkpoint

    def fill_up(folder: RunFolder, step: int, *arguments: Any, **options: Any) -> None:
        if step > 2:
            raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")
        save(folder, step, *arguments, **options)

    monkeypatch.setattr(RunFolder, "save_checkpoint", fill_up)
    out = tmp_path / "run"
    code = et("train", *small, "--steps", 4, "--checkpoint-every", 2, "--out", out)
    assert_refused(capsys, code, "model.safetensors: No space left on device", "free some space", "--resume")
    assert RunFolder.open(out).load_checkpoint().step == 2
    monkeypatch.undo()
    assert et("train", "--resume", out) == 0


def exhaust_the_accelerator() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def exhaust_the_cpu() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def exhaust_numpy() -> None:
    np.empty(2**60, np.uint8)


def exceed_all_addresses() -> None:
    torch.empty(2**40, 2**40, device="meta")


def exceed_all_counts() -> None:
    torch.empty(1, device="meta").expand(2**40, 2**40).numel()


def exceed_all_numbers() -> None:
    torch.empty(2**70, device="meta")


RUN_OUT = [
    *(exhaust_the_accelerator, exhaust_the_cpu, exhaust_numpy),
    *(exceed_all_addresses, exceed_all_counts, exceed_all_numbers),
]


@pytest.mark.parametrize("run_out", RUN_OUT)
def test_running_out_of_memory_is_one_line_elsewhere_too(
    run_out: Callable[[], None], run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate_command, "load_model", lambda *_: run_out())
    assert_refused(capsys, et("generate", run), "out of memory; use a smaller model")


@pytest.mark.parametrize("run_out", RUN_OUT)
def test_running_out_of_memory_names_the_options_that_help(
    run_out: Callable[[], None],
    small: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def exhaust(*arguments: object, **options: object) -> None:
        run_out()

    monkeypatch.setattr(full_run, "train", exhaust)
    code = et("train", *small, "--out", tmp_path / "run")
    assert_refused(capsys, code, "out of memory", "--batch-size", "--accumulation", "--activation-checkpointing")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("error", [TypeError, AssertionError, RuntimeError])
def test_a_bug_keeps_its_traceback(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expert_threshold.cli._run", lambda arguments: _raise(error("a bug")))
    with pytest.raises(error, match="a bug"):
        main([])


def test_debugging_shows_the_traceback_of_a_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ET_DEBUG", "1")
    with pytest.raises(ValueError, match="unknown command"):
        main(["nonsense"])


def test_an_interrupt_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("expert_threshold.cli._run", lambda arguments: _raise(KeyboardInterrupt()))
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "et train: interrupted\n"


def _raise(error: BaseException) -> int:
    raise error


def test_help_loads_nothing_heavy() -> None:
    program = "import sys; from expert_threshold.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True)


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "expert_threshold", "tarin"]  # which imports no torch
    result = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "et: unknown command tarin; did you mean train?\n"


@pytest.mark.parametrize("arguments", [["--help"], ["recipes"]], ids=["print", "table"])
def test_a_reader_that_has_seen_enough_is_no_error(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "expert_threshold", *arguments]
    result = subprocess.run(command, timeout=120, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_dispatch_that_cannot_run_here_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BACKENDS["triton"], "why_not", lambda *_: "needs a CUDA GPU")
    assert main(["train", "tiny", "--dispatch", "triton", "--out", str(tmp_path / "run")]) == 2
    assert "et train: dispatch='triton' needs a CUDA GPU" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train tiny", "compare tiny --rules dense"])
def test_a_command_that_fails_leaves_none_of_the_folders_it_made(command: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "empty.txt").touch()
    for out in ("mine/made/run", "made/run"):
        assert et(*command.split(), "--data", tmp_path / "empty.txt", "--out", tmp_path / out) == 2
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty.txt", "mine"]


def test_a_new_folder_that_fails_leaves_none_of_its_parents(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), new_folder(tmp_path / "made" / "too" / "to") as folder:
        (folder / "missing" / "file").touch()
    assert not any(tmp_path.iterdir())
    with new_folder(tmp_path / "made" / "too" / "to") as folder:
        (folder / "whole").touch()
    assert [path.name for path in (tmp_path / "made" / "too" / "to").iterdir()] == ["whole"]


def test_the_working_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files were in a folder that the shell did not see: it stood in the one that had been replaced."""
    monkeypatch.chdir(tmp_path)
    for to in (".", tmp_path):
        with pytest.raises(ValueError, match=f"--to {to}: is the working folder; name a new folder"), new_folder(to):
            pass
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("rule", "accumulation", "told"),
    [
        ("expert_choice", 1, True),
        ("expert_choice", 4, False),
        ("expert_choice --pool 256", 1, False),
        ("token_choice --balance aux", 1, True),
        ("expert_threshold", 1, False),
        ("dense", 1, False),
    ],
)
def test_ranks_that_give_a_rule_smaller_pools_are_told(rule: str, accumulation: int, told: bool) -> None:
    config = resolve_run(
        parse_run("et train", "", [], ["tiny", "--rule", *rule.split(), f"--accumulation={accumulation}"])
    )
    said = train_command.introduce(config, mock.Mock(world_size=2))
    assert ("looks at 1,024 tokens of each rank, where one process has 2,048" in said) == told
    assert "of each rank" not in train_command.introduce(config, None)

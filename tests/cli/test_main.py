"""The command `et`: what it understands, what it refuses in one line, and what it leaves alone."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
import torch

from cases import et, resolved, said
from commands import Options, Refused
from expert_threshold import full_run
from expert_threshold.analysis.figures import FIGURES
from expert_threshold.cli import COMMANDS, main, options
from expert_threshold.cli import data as data_command
from expert_threshold.cli import generate as generate_command
from expert_threshold.cli.options import EVERYDAY, Option, flag_of, parse, show
from expert_threshold.cli.run_options import resolve_run, run_options
from expert_threshold.config import KINDS, RUNS, resolve
from expert_threshold.data.public import VARIABLE, core_bundle
from expert_threshold.files import new_folder
from expert_threshold.moe import BACKENDS
from expert_threshold.option import Bounds, alternatives, convert, describe
from expert_threshold.recipes import methods
from expert_threshold.routing import RULES, TokenChoice, option


def help_and_options(command: str) -> tuple[str, list[Option]]:
    """The output of `et COMMAND --help`, or of `--help-all` if it has one, and the options it lists."""
    made: list[list[Option]] = []
    init = options.Parser.__init__

    def noted(self: options.Parser, prog: str, description: str, offered: list[Option]) -> None:
        made.append(offered)
        init(self, prog, description, offered)

    flag = "--help-all" if command in ("train", "plan", "compare", "sweep") else "--help"
    with mock.patch.object(options.Parser, "__init__", noted):
        return said(*command.split(), flag), made[-1]


DATA_COMMANDS = {name: entry.summary for name, entry in data_command.ENTRIES.items()}
HELP = {
    command: help_and_options(command)
    for command in [name for name in COMMANDS if name != "data"] + [f"data {name}" for name in DATA_COMMANDS]
}


def unwrapped(help_text: str) -> str:
    """Return the text without line breaks."""
    return " ".join(help_text.split())


@pytest.mark.parametrize(("program", "entries"), [("et", COMMANDS), ("et data", DATA_COMMANDS)])
def test_help_lists_every_command(program: str, entries: Any) -> None:
    text = said(*program.split()[1:], "--help")
    for name, summary in entries.items():
        assert f"{program} {name} " in text
        assert summary in text


def test_the_version_is_printed() -> None:
    assert said("--version").startswith("expert-threshold ")


@pytest.mark.parametrize("command", HELP)
def test_help_shows_every_option_with_its_default_and_every_value_that_has_a_name(command: str) -> None:
    """Regression: --dispatch listed three of five names, PRESET only its default, and --recipe broke names in two."""
    text, offered = HELP[command]
    assert text.startswith(f"usage: et {command}")
    for each in offered:
        assert (f"--[no-]{each.flag[2:]}" if each.kind is bool else each.flag) in text
        assert each.help
        assert unwrapped(each.help) in unwrapped(text), each.flag
        assert each.required or f"(default: {show(each.default)})" in unwrapped(text)
        if names := {name for name, _ in alternatives(each.kind) if isinstance(name, str)}:
            assert names <= set(re.split(r"[^\w-]+", help_of(each, text))), each.flag


def help_of(option: Option, text: str) -> str:
    """Return the help of one option as one line."""
    lines = text.splitlines()
    name = re.compile(rf"  {option.flag}(?![\w.-])")
    first = next(number for number, line in enumerate(lines) if name.match(line))
    rest = itertools.takewhile(lambda line: not line.startswith("  --"), lines[first + 1 :])
    return " ".join([lines[first], *rest])


def test_help_lists_the_names_that_stand_in_lists_and_every_dispatch() -> None:
    for command, names in (("compare", list(methods())), ("analyze", [study.name for study in FIGURES])):
        assert set(names) <= set(re.split(r"[^\w-]+", HELP[command][0]))
    kind = next(option.kind for option in HELP["train"][1] if option.name == "model.dispatch")
    assert {name for name, _ in alternatives(kind)} == set(BACKENDS)


def test_an_option_that_is_any_text_refuses_none() -> None:
    """Options that take a few names have a type that lists them; --help and errors are made from it."""
    for path, kind in KINDS.items():
        if (str, Bounds()) in alternatives(kind) and path != "model.windows":  # a pattern, which says so itself
            resolve("tiny", {path: "no-such-name"})


def test_help_shows_the_defaults_of_the_chosen_preset_and_rule(capsys: pytest.CaptureFixture[str]) -> None:
    et("plan", "d12", "--rule", "token_choice", "--seed", 17, "--help")
    text = unwrapped(capsys.readouterr().out)
    for default in ("19073", "65536", "token_choice", "17"):
        assert f"(default: {default})" in text


@dataclass(frozen=True)
class Clashing(TokenChoice):
    """A rule whose options are named like others."""

    seed: int = option(5, "Draws the routers. It has no effect on anything else.")
    out: int | None = option(None, "none is no help.")
    decay: float = option(1.0, "Exponent of the gates.")


def test_help_shows_the_options_of_the_chosen_rule_alone_which_may_have_the_names_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: --seed meant only the run's seed, and the rule's seed could not be set."""
    monkeypatch.setitem(RULES._rules, "clashing", Clashing)  # type: ignore[attr-defined]
    config = resolved("tiny --rule clashing --seed 7 --rule.seed 9 --rule.out none")
    assert config.model.rule == Clashing(seed=9)
    assert config.train.seed == 7
    text = unwrapped(said("train", "--rule", "clashing", "--help"))
    assert "--rule.seed INT Draws the routers. (default: 5)" in text
    assert "--rule.out INT|none none is no help. (default: none)" in text
    assert "--rule.warmup-steps" not in text


@pytest.mark.parametrize("rule", ["dense", *RULES])
def test_help_is_a_screen_and_a_half_and_names_every_everyday_option_and_the_precedence(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it had 422 lines."""
    monkeypatch.setenv("COLUMNS", "80")
    text = said("train", "--rule", rule, "--help")
    assert text.count("\n") <= 90
    assert "flag, file, resumed or initial run, recipe, preset" in unwrapped(text)
    for path in EVERYDAY:
        assert (rule == "dense" and path in ("rule.num_experts", "rule.experts_per_token")) or flag_of(path) in text


@pytest.mark.parametrize("preset", RUNS)
@pytest.mark.parametrize("rule", ["expert_threshold", "token_choice", "dense"])
def test_every_default_can_be_typed_as_it_is_shown(preset: str, rule: str) -> None:
    for offered in run_options(resolve(preset, {"rule.name": rule})):
        if offered.kind is not bool:
            assert convert(offered.kind, show(offered.default)) == offered.default


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (float, "1e-3", 0.001),
        (float | None, "none", None),
        (Literal["none", "aux"], "none", "none"),
        (Literal["batch", "global"] | int, "global", "global"),
        (Literal["batch", "global"] | int, "64", 64),
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
    assert convert(kind, text) == value


def test_no_other_text_is_a_number() -> None:
    for kind, texts in ((int, ["", "x", "1.5", "nan", "none"]), (float, ["nan", "inf", "-inf", "x"])):
        for text in texts:
            with pytest.raises(ValueError, match="expected a"):
                convert(kind, text)


def test_flags_set_what_they_name() -> None:
    of_rule = "--rule.pool 128 --rule.capacity-slack none --no-rule.debias"
    config = resolved(
        f"tiny {of_rule} --train.eval-every=none --model.gate-norm fanout --optim.betas 0.8,0.9 --d-model 128"
    )
    rule = config.model.rule
    assert (rule.pool, rule.capacity_slack, rule.debias) == (128, None, False)
    assert (config.model.gate_norm, config.model.d_model) == ("fanout", 128)
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
    text = arguments[-1].removeprefix("--prompt=")
    given = parse("et generate", "", generate_command.OPTIONS, ["run", *arguments, "--seed", "-1"])
    assert given == {"run": "run", "prompt": text, "seed": -1}


def refused_texts(option: Option) -> list[str]:
    """Texts that an option's type does not allow: an empty one, an unknown name, and numbers next to its bounds."""
    kinds = alternatives(option.kind)
    texts = [] if ("", Bounds()) in kinds else [""]
    if option.positional or any(plain is str for plain, _ in kinds):
        return texts
    for plain, bounds in kinds:
        if plain in (int, float):
            near = (bounds.least, -1), (bounds.above, 0), (bounds.most, 1), (bounds.below, 0)
            texts += [str(plain(bound + step)) for bound, step in near if math.isfinite(bound)]
    return [*texts, "no-such-name"]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (command, option)
        for command, (_, offered) in HELP.items()
        for option in offered
        # Every command that has a run's options has all of them, and those of rules are read as text at first.
        if option.kind is not bool and ("." not in option.name or (command == "train" and "rule." not in option.name))
    ],
    ids=lambda value: value if isinstance(value, str) else value.flag,
)
def test_what_an_options_type_does_not_allow_is_refused_by_the_name_that_was_typed(
    command: str, option: Option, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an empty --rules was called an unknown method, an empty RUN a folder without a name, and an empty
    --to a folder that already exists."""
    monkeypatch.chdir(tmp_path)
    others = [f"{other.flag}=x" for other in HELP[command][1] if other.required and not other.positional]
    for text in refused_texts(option):
        typed = text if option.positional else f"{option.flag}={text}"
        words = f"expected {describe(option.kind)}, not {text}" if text else "must not be empty"
        refused([*command.split(), *others, typed], f"{option.flag}: {words}")


@pytest.mark.parametrize("command", ["train --init-from RUN", "sweep", "plan"])
def test_a_file_whose_section_is_no_object_is_refused(
    command: str, run: Path, refused: Refused, tmp_path: Path
) -> None:
    """Regression: et sweep and --init-from read the section first and ended with a traceback."""
    (file := tmp_path / "odd.json").write_text('{"model": 5, "train": 5}')
    arguments = [run if word == "RUN" else word for word in command.split()]
    refused([*arguments, "--config", file], f"--config {file}: section 'model'", "not 5")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"train": {"seed": 7, "eval_every": null}}'),
        ("a.toml", '[train]\nseed = 7\neval_every = "none"\n'),
    ],
)
def test_a_file_is_json_or_toml_and_may_begin_with_a_byte_order_mark(name: str, text: str, tmp_path: Path) -> None:
    """Regression: some Windows editors write one, and the file was called neither JSON nor TOML."""
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    train = resolve_run({"config": str(tmp_path / name)}).train
    assert (train.seed, train.eval_every) == (7, None)
    (tmp_path / "twice.json").write_text('{"train": {"seed": 7}, "train": {}}')
    with pytest.raises(ValueError, match=r"twice.json is not .* \('train' is repeated\)"):
        resolve_run({"config": str(tmp_path / "twice.json")})


def test_options_of_a_file_s_rule_may_need_those_that_are_typed(tmp_path: Path) -> None:
    rule = {"name": "expert_threshold", "experts_per_token": 32, "num_experts": 16.0}
    (tmp_path / "file.json").write_text(json.dumps({"rule": rule}))
    assert et("plan", "--config", tmp_path / "file.json", "--num-experts", 64, "--json") == 0


def exhaust_the_accelerator() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


RUN_OUT: dict[str, Callable[[], object]] = {
    "accelerator": exhaust_the_accelerator,
    "CPU": lambda: torch.empty(2**60, dtype=torch.uint8),
    "NumPy": lambda: np.empty(2**60, np.uint8),
    "addresses": lambda: torch.empty(2**40, 2**40, device="meta"),
    "counts": lambda: torch.empty(1, device="meta").expand(2**40, 2**40).numel(),
    "numbers": lambda: torch.empty(2**70, device="meta"),
}


@pytest.mark.parametrize("run_out", RUN_OUT.values(), ids=RUN_OUT)
def test_running_out_of_memory_is_one_line_and_names_the_options_that_help(
    run_out: Callable[[], object], run: Path, small: Options, refused: Refused, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(generate_command, "load_model", lambda *_: run_out())
    refused(["generate", run], "out of memory; use a smaller model")
    monkeypatch.setattr(full_run, "train", lambda *_, **__: run_out())
    options = ["--batch-size", "--accumulation", "--train.activation-checkpointing"]
    refused(["train", *small, "--out", tmp_path / "run"], "out of memory", *options)


BUGS = (TypeError("a bug"), AssertionError("a bug"), RuntimeError("a bug"))


def test_debugging_shows_the_traceback_of_a_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ET_DEBUG", "1")
    with pytest.raises(ValueError, match="unknown command"):
        main(["nonsense"])


def test_a_bug_keeps_its_traceback_and_an_interrupt_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("expert_threshold.cli._run", mock.Mock(side_effect=[*BUGS, KeyboardInterrupt]))
    for bug in BUGS:
        with pytest.raises(type(bug), match="a bug"):
            main([])
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "et train: interrupted\n"


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
    """Regression: the files were in a folder invisible to the shell, whose working directory had been replaced."""
    monkeypatch.chdir(tmp_path)
    for to in (".", tmp_path):
        with pytest.raises(ValueError, match=f"--to {to} is the working directory; name a new folder"), new_folder(to):
            pass
    assert not any(tmp_path.iterdir())


# Wherever the output goes, and where folders of the system are missing.


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_command_works_with_a_closed_output(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python sets closed streams to None, as under `et recipes >&-`."""
    monkeypatch.setattr(sys, closed, None)
    assert et("recipes") == 0
    assert et("train", "--no-such-option") == 2
    getattr(sys, closed).close()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_utf_8_gets_escapes(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding))
    assert et("recipes") == 0
    assert "\\u2013" in shown.getvalue().decode(encoding)


def test_a_terminal_of_no_columns_is_one_of_unknown_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert "expert_threshold" in said("recipes")


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container user without an entry in the user database."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for variable in ("HOME", "XDG_CACHE_HOME", VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize("line", ["data core", "data tokenizer", "train --data fineweb-edu"])
def test_without_a_home_folder_another_cache_is_asked_for(line: str, homeless: None, refused: Refused) -> None:
    assert core_bundle() is None  # which is asked for by every evaluation
    refused(line.split(), f"set {VARIABLE} to another cache folder")

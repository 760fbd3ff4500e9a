"""`et generate`: what it prints, and what it never sends to a terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cases import et
from commands import Refused
from expert_threshold.cli import generate as generate_command
from expert_threshold.generate import Step


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
    terminal: bool, routing: bool, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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


def test_a_prompt_that_is_not_utf_8_is_named(run: Path, refused: Refused) -> None:
    refused(["generate", run, "--show-routing", "--prompt", "a\udcff"], "--prompt 'a\\udcff' is not UTF-8")

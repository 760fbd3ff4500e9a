"""`et generate`: what it prints, and what it never sends to a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cases import et, said
from expert_threshold.cli import generate as generate_command
from expert_threshold.generate import Step


def test_generation_repeats_itself_under_a_seed_and_shows_where_tokens_went(run: Path) -> None:
    generate = ["generate", run, "--prompt", "the [cat]", "--max-tokens", 20, "--seed"]
    texts = [said(*generate, seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("the [cat]") for text in texts)
    legend, _, text = said(*generate, 1, "--show-routing").partition("\n")
    assert legend.startswith("routed experts per layer")
    assert text == texts[0]


SPACES = ("a", "\t", "b\r\n", "\x0b", " c ")


@pytest.mark.parametrize("routing", [False, True])
@pytest.mark.parametrize(
    ("terminal", "pieces", "shown"),
    [(True, ["a\x1b[2Jb"], "a\\x1b[2Jb"), (False, ["a\x1b[2Jb"], "a\x1b[2Jb"), (False, SPACES, "".join(SPACES))],
)
def test_text_is_printed_as_it_comes_but_a_terminal_gets_no_orders_from_a_model(
    terminal: bool, pieces: Sequence[str], shown: str, routing: bool, run: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    steps = [Step(0, piece, 0.0, "length", () if routing else None) for piece in pieces]
    monkeypatch.setattr(generate_command, "generate", lambda *_, **__: iter(steps))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "dumb")
    assert et("generate", run, "--prompt", "\tp", *(["--show-routing"] if routing else [])) == 0
    assert capsys.readouterr().out.endswith(f"\tp{shown}\n")

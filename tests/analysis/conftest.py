from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from expert_threshold.analysis import page
from expert_threshold.analysis.figures import load, scores
from expert_threshold.cli import main
from tiny_runs import RUNS, make_runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `make_runs`. No test may change it."""
    return make_runs(tmp_path_factory.mktemp("runs"))


def draw_little(patch: pytest.MonkeyPatch) -> None:
    """Draw as few pixels and random numbers as possible."""
    patch.setattr(page, "DPI", 20)
    patch.setattr(load, "STEPS", 2)
    patch.setattr(load, "TOKENS_PER_EXPERT", (64, 1024))
    patch.setattr(scores, "POOLS", 8)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_little(monkeypatch)


@pytest.fixture(scope="session")
def out(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The analysis of all runs; its page draws load alone, since the files have the same drawings."""
    folder, svg = tmp_path_factory.mktemp("analysis"), page.svg

    def svg_of_load(figure: Any, prefix: str, *named: str) -> str:
        return svg(figure, prefix, *named) if "load" in prefix else ""

    with pytest.MonkeyPatch.context() as patch:
        draw_little(patch)
        patch.setattr(page, "svg", svg_of_load)
        paths = [str(runs / name) for name in RUNS]
        domains = [f"--gsm8k={runs / 'math.jsonl'}", f"--human-eval={runs / 'code.jsonl'}"]
        domains += ["--domain", f"prose={runs / 'prose.jsonl'}", "--dtype", "float32"]
        assert main(["analyze", *paths, "--out", str(folder), "--tokens", "1024", *domains]) == 0
    return folder

"""Fixtures for commands run in this process: one corpus and one small run, shared by all tests."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path

import pytest

from cases import RULES, et, small_model, write_bundle, write_run, write_text
from commands import Options

TEXT = "the cat sat on a mat and saw another cat by the old river where all the other cats lived "


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of forty documents."""
    return write_text(tmp_path_factory.mktemp("text") / "corpus.jsonl", TEXT, documents=40, words=200)


SIZES = "--vocab-size 270 --batch-size 2 --context 32 --layers 3 --d-model 32 --model.heads 2"
INTERVALS = "--eval-every 2 --eval-tokens 128 --log-every 1 --checkpoint-every 2"


@pytest.fixture(scope="session")
def small(text: Path) -> Options:
    """Options of a run that takes no time: 3 layers, two of them with experts; validations at steps 2 and 4."""
    return ["tiny", "--data", text, "--threads", 1, *SIZES.split(), *INTERVALS.split()]


@pytest.fixture(scope="session")
def run(small: Options, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps. No test may change it."""
    path = tmp_path_factory.mktemp("runs") / "run"
    with contextlib.redirect_stdout(io.StringIO()):
        options = ["--steps", 4, "--sample-every", 2, "--eval-tokens", 10_000, "--dtype", "float32"]
        assert et("train", *small, *options, "--out", path) == 0
    return path


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each of several rules, by name, and their text. No test may change them."""
    folder = tmp_path_factory.mktemp("made")
    text = write_text(folder / "corpus.jsonl")
    for name in ("dense", "token_choice", "expert_choice", "expert_threshold"):
        write_run(folder / name, small_model(RULES[name]), text=text)
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The questions of two tasks."""
    copy = [{"context": f"cat {i}", "continuation": f"cat {i}"} for i in range(5)]
    animals = [{"query": "the cat sat on", "choices": ["a mat", "xylophone"], "gold": i % 2} for i in range(4)]
    tasks = {"copy": ("language_modeling", 1, 0, copy), "animals": ("multiple_choice", 0, 50, animals)}
    return write_bundle(tmp_path / "bundle", tasks)

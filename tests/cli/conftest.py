"""Fixtures for commands run in this process: one corpus and one small run, shared by all tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cases import RULES, said, small_model, write_bundle, write_run, write_text
from commands import Experiment, Options
from expert_threshold.compare import sweep

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
    options = ["--steps", 4, "--sample-every", 2, "--eval-tokens", 10_000, "--dtype", "float32"]
    said("train", *small, *options, "--out", path)
    return path


@pytest.fixture(scope="session")
def comparison(small: Options, tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """A comparison of three methods with two seeds. No test may change it."""
    options = [*small, "--steps", 4, "--num-experts", 4, "--rules", "dense,token_choice,expert_threshold", "--seeds", 2]
    made = Experiment("compare", options, tmp_path_factory.mktemp("comparison") / "out")
    said(*made.command)
    return made


SEARCHED = "optim.matrix_lr=0.005..0.1:log", "optim.betas=0.9,0.95|0.8,0.95", "rule.warmup_steps=0..2"


@pytest.fixture(scope="session")
def search(small: Options, tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """A sweep of three trials for each of two methods, with two validations each. No test may change it."""
    pytest.importorskip("optuna", reason="optuna is not installed")
    space = [part for entry in SEARCHED for part in ("--space", entry)]
    options = [*small, "--layers", 2, "--num-experts", 4, "--steps", 4, "--methods", "dense,expert_threshold", *space]
    made = Experiment("sweep", [*options, "--trials", 3], tmp_path_factory.mktemp("sweep") / "out")
    said(*made.command)
    return made


@pytest.fixture(scope="session", autouse=True)
def no_speed_is_measured() -> Iterator[None]:
    """Before a sweep starts, which would take longer than its trials."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "tokens_within", lambda *_: 10**7)
        yield


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

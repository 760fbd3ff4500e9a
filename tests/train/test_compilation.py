from __future__ import annotations

import functools
from pathlib import Path
from unittest import mock

import pytest
import torch

from cases import et
from expert_threshold.model import GPT, GPTConfig
from expert_threshold.runs import RunFolder
from expert_threshold.train import TrainConfig, compilation
from expert_threshold.train.compilation import pick_compile

from .test_loop import forget_after

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's tracer

CPU = torch.device("cpu")
LONG = TrainConfig(steps=100_000)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "failure", lambda device: None)


@pytest.mark.parametrize(
    ("config", "train", "device", "ranks", "compiles"),
    [
        (GPTConfig(), LONG, "cpu", 1, True),
        (GPTConfig(), LONG, "cpu", 2, False),
        (GPTConfig(), LONG, "mps", 1, False),
        (GPTConfig.preset("tiny"), TrainConfig(steps=10), "cpu", 1, False),
        (GPTConfig(), TrainConfig(steps=100_000, compile="off"), "cpu", 1, False),
    ],
)
def test_a_long_run_of_one_process_is_compiled_and_what_does_not_pay_or_work_is_not(
    config: GPTConfig, train: TrainConfig, device: str, ranks: int, compiles: bool, compiler: None
) -> None:
    assert pick_compile(config, train, torch.device(device), ranks=ranks, say=print) == compiles
    with pytest.raises(ValueError, match="not supported for several processes"):
        pick_compile(GPTConfig(), TrainConfig(compile="on"), CPU, ranks=2, say=print)


def test_without_a_compiler_auto_goes_on_without_and_on_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(compilation, "failure", lambda device: "no g++")
    assert not pick_compile(GPTConfig(), LONG, CPU, ranks=1, say=print)
    for more in ([], ["--minutes", "0.1"]):
        assert et("train", "tiny", "--compile", "on", "--out", tmp_path / "run", *more) == 2
        assert "compile='on' does not work on this machine (no g++); use --compile off" in capsys.readouterr().err


def test_a_compiled_model_trains(compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus: Path) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    small = "--steps 2 --sample-every 9 --vocab-size 300 --batch-size 2 --context 16 --layers 2 --compile on"
    assert et(*f"train tiny --data {corpus} --out {tmp_path / 'run'} {small}".split()) == 0
    assert RunFolder.open(tmp_path / "run").config["compiled"]


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ("g++: not found\nand much more", "g++: not found"),
        ("inductor raised:\n\nCppCompileError: no space\nand more", "inductor raised: CppCompileError: no space"),
    ],
)
def test_a_broken_compiler_is_told_in_one_line(raised: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", mock.Mock(side_effect=RuntimeError(raised)))
    assert compilation.failure.__wrapped__(CPU) == told


@torch._dynamo.config.patch(recompile_limit=2)
def test_more_models_than_torch_keeps_graphs_of_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    tokens = torch.zeros(1, 4, dtype=torch.long)
    models = [GPT(GPTConfig(32, 4, layers, 8, 1, 1, 8, 8, rule=None)) for layers in range(1, 4)]
    for model in models:
        compilation.compiled(model)(tokens, tokens)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, while it compiles
def test_compiled_by_inductor_a_run_learns_as_without_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def run(name: str, *options: str) -> RunFolder:
        small = "--steps 6 --seed 1 --dtype float32 --log-every 1 --checkpoint-every 3"
        assert et("train", "tiny", *small.split(), "--out", tmp_path / name, *options) == 0
        return RunFolder.open(tmp_path / name)

    plain, compiled = run("plain", "--compile", "off"), run("compiled", "--compile", "on")
    assert compiled.config["compiled"]
    assert not plain.config["compiled"]
    losses = [[r["loss"] for r in folder.metrics.read() if r["split"] == "train"] for folder in (plain, compiled)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    whole = compiled.load_checkpoint(6).tensors["model"]
    forget_after(compiled.path, 3)
    assert et("train", "--resume", compiled.path) == 0
    resumed = compiled.load_checkpoint(6).tensors["model"]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)

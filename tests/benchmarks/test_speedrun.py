"""`benchmarks/speedrun.py`: its arithmetic, its errors, and a run without nanochat."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import speedrun
from expert_threshold.cli import main as et

FALLING: speedrun.Curve = [(100, 1.0, 5.0), (200, 2.0, 4.0), (300, 3.0, 4.0), (400, 5.0, 3.0)]


@pytest.mark.parametrize(
    ("seconds", "compiling"),
    [({10: 25, 20: 35, 30: 45, 35: 50}, 15), ({10: 9, 20: 19, 30: 29}, 0), ({60: 40, 120: 50}, 30), ({60: 40}, 0)],
)
def test_the_compilers_seconds_are_those_beyond_the_median_step(seconds: dict[int, float], compiling: float) -> None:
    lines = [{"step": step, "seconds": since} for step, since in seconds.items()]
    result = SimpleNamespace(curve=[(100, 5.0)], clock=[50.0])
    compared = SimpleNamespace(result=result, train=lines, config={"compiled": True})
    assert speedrun.curve_of(compared) == [(100, 50.0 - compiling, 5.0)]  # type: ignore[arg-type]


def test_shares_are_of_what_nanochat_needs_and_absent_where_a_seed_never_gets_there() -> None:
    theirs: speedrun.Curve = [(200, 10.0, 5.0), (400, 20.0, 3.5)]
    never: speedrun.Curve = [(400, 5.0, 4.0)]
    found = speedrun.summarise({"ours": [FALLING, FALLING], "slow": [FALLING, never], "nanochat": [theirs, theirs]})
    assert found["ours"]["share_of_tokens"] == 350 / 400
    assert found["ours"]["share_of_seconds"] == 4 / 20
    assert found["slow"]["share_of_tokens"] is None


def test_nanochats_schedules_rise_hold_and_fall() -> None:
    """The values of its training script for 1,000 steps: 40 of warmup, the last 650 of cooldown."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 1.0, "initial_lr": 2.0, "kind": "muon"}])
    found = {}
    for step in (0, 39, 200, 675, 999):
        speedrun.schedule(optimizer, step, 1000)
        found[step] = [optimizer.param_groups[0][name] for name in ("lr", "momentum", "weight_decay")]
    assert found[0] == pytest.approx([2 / 40, 0.85, 0.28])
    assert found[39][0] == pytest.approx(2)
    assert found[200] == pytest.approx([2, 0.91, 0.28 * 0.5 * (1 + 0.8090169944)])
    assert found[675] == pytest.approx([2 * (0.5 + 0.5 * 0.05), 0.935, 0.28 * 0.5 * (1 - 0.5224985647)])
    assert found[999] == pytest.approx([2 * (1 / 650 + 649 / 650 * 0.05), 0.9 + 0.07 / 650, 0.0], abs=1e-5)


NANOCHAT = """
import torch

class GPTConfig:
    def __init__(self, **sizes):
        self.__dict__ |= sizes

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head = torch.nn.Embedding(config.vocab_size, config.vocab_size)

    def init_weights(self):
        torch.nn.init.zeros_(self.head.weight)

    def setup_optimizer(self, matrix_lr, **_):
        return torch.optim.SGD([{"params": [self.head.weight], "lr": 9, "initial_lr": 9, "kind": "adamw"}])

    def forward(self, tokens, targets, loss_reduction="mean"):
        logits = self.head(tokens).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction=loss_reduction, ignore_index=-1)
"""


def test_a_stand_in_for_nanochat_trains_on_the_batches_of_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i} of a short text about nothing much" for i in range(3000)))
    (tmp_path / "checkout" / "nanochat").mkdir(parents=True)
    (tmp_path / "checkout" / "nanochat" / "gpt.py").write_text(NANOCHAT)
    sizes = "--layers 1 --d-model 32 --model.heads 2 --model.kv-heads 2 --vocab-size 300 --context 32 --batch-size 2"
    small = ["tiny", *sizes.split()]
    fixed = ["--rules", "dense", "--data", str(text), "--eval-every", "2", "--eval-tokens", "100", "--threads", "1"]
    for steps in ("4", "2"):
        assert et(["compare", *small, *fixed, "--steps", steps, "--out", str(tmp_path / steps)]) == 0
    monkeypatch.setattr(sys, "path", [*sys.path])
    command = ["speedrun", str(tmp_path / "4"), str(tmp_path / "2"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*command, "--nanochat", str(tmp_path / "checkout")])
    speedrun.main()
    result = json.loads((tmp_path / "out" / "speedrun.json").read_text())
    lengths = {name: [point[0] for point in curves[0]] for name, curves in result["runs"].items()}
    assert lengths == {"dense": [128, 256], "dense (2 steps)": [128], "nanochat": [128, 256]}
    losses = [point[2] for point in result["runs"]["nanochat"][0]]
    assert 5 < losses[1] < losses[0] < math.log(300)  # nats per token; the first guess is that all are alike
    assert (tmp_path / "out" / "seconds.png").exists()
    monkeypatch.setattr(speedrun, "train_nanochat", None)
    capsys.readouterr()
    speedrun.main()  # continues, which trains nothing
    assert "256 tokens" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, "--nanochat", "nowhere"])
    with pytest.raises(ValueError, match=r"has no nanochat/gpt.py"):
        speedrun.main()

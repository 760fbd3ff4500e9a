"""The scripts of `examples/` run as they stand, and show what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from processes import run_python

ROOT = Path(__file__).parents[1]


def run(name: str) -> str:
    return run_python(ROOT / "examples" / name, strict=True)


def test_rules_alone_balance_loads_as_they_say() -> None:
    rows = run("routing_alone.py").splitlines()
    loads = {row[:24].strip(): [int(load) for load in re.findall(r"\d+", row[:80])[:8]] for row in rows}
    spread = {name: max(load) * 8 / sum(load) for name, load in loads.items()}
    assert set(spread) == {"token choice", "token choice, loss-free", "expert choice", "expert threshold"}
    assert spread["token choice"] > 2
    assert max(value for name, value in spread.items() if name != "token choice") < 1.5


def test_a_loop_of_one_s_own_trains_the_layer() -> None:
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", run("own_loop.py"))]
    assert losses[-1] < losses[0] - 0.5


def test_a_llama_trains_with_the_layer_in_its_blocks() -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", run("llama_block.py"))]
    assert losses[-1] < losses[0] - 0.5

"""The scripts of `examples/` run as they stand, and show what they say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from commands import run_python

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "first_look.ipynb"


def run(name: str) -> str:
    return run_python("-W", "error", ROOT / "examples" / name)


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


def test_the_first_look_runs_from_top_to_bottom(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="needs ipykernel: pip install ipykernel")
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[viz]'")
    program = """if True:
        import sys, nbformat, nbclient
        notebook = nbformat.read(sys.argv[1], 4)
        nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
        kinds = [kind for cell in notebook.cells for out in cell.get("outputs", []) for kind in out.get("data", ())]
        print(kinds.count("image/png"), kinds.count("text/html"))
    """
    less = {"FIRST_LOOK": "--steps 4 --batch-size 4 --train.accumulation 1"}
    assert run_python("-c", program, NOTEBOOK, cwd=tmp_path, **less).split()[-2:] == ["2", "1"]


def test_the_first_look_is_saved_with_outputs_that_are_small_and_name_no_machine() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert sum(bool(cell["outputs"]) for cell in cells) == 4
    assert len(text) < 300_000
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)


def test_transformers_trainer_trains_olmoe_s_shape_with_thresholds() -> None:
    pytest.importorskip("accelerate", reason="needs transformers' Trainer: pip install -e '.[hf]'")
    first, last, fanout = map(float, re.findall(r"\d+\.\d+", run("olmoe_trainer.py").splitlines()[-1]))
    assert last < first - 0.5
    assert 6 < fanout < 10  # of 64


def trained(router: torch.nn.Module, layer: Callable[[Tensor], Tensor], fanout: Callable[[], float]) -> None:
    """Train a neighbour's layer whose router is ours, and require that its cutoffs move and hold the mean fanout."""
    optimizer = torch.optim.AdamW(router.parameters(), 1e-2)
    for step in range(12):
        x = torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(step))
        layer(x).square().mean().backward()
        assert int(router.state.step) == step
        optimizer.step()
        if hasattr(router, "post_batch"):
            router.post_batch()
        optimizer.zero_grad()
    assert router.state.mean.abs().min() > 0
    router.eval()
    with torch.no_grad():
        layer(torch.randn(10, 100, 32))
    assert fanout() == pytest.approx(2, abs=0.4)


@pytest.mark.filterwarnings("ignore")
def test_torchtitan_trains_with_expert_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed; the example was run against 0.3.0")
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common import moe
    from torchtitan.models.common.linear import Linear

    monkeypatch.syspath_prepend(ROOT / "examples")
    import torchtitan_router as ours

    torch.manual_seed(0)
    dispatcher = ours.LocalTokenDispatcher.Config(num_experts=8, top_k=2)
    experts = moe.GroupedExperts.Config(dim=32, hidden_dim=16, num_experts=8)
    config = moe.MoE.Config(
        num_experts=8,
        routed_experts=moe.RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher),
        router=ours.TokenChoiceTopKRouter.Config(
            num_experts=8, top_k=2, gate=Linear.Config(in_features=32, out_features=8)
        ),
    )
    names = [f"torchtitan_router.{name}" for name in ("threshold_router", "threshold_dispatcher")]
    apply_overrides(OverrideConfig(imports=[(names[0], {"warmup_steps": 3, "decay": 0.5}), names[1]]), config)
    layer = config.build()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    seen: list[Any] = []
    layer.router.register_forward_hook(lambda _, inputs, found: seen.append((inputs[0], found)))
    trained(layer.router, layer, lambda: float((seen[-1][1][0] != 0).float().sum(-1).mean()))
    x, (gates, *_) = seen[-1]
    w1, w2, w3 = (getattr(layer.routed_experts.inner_experts, name) for name in ("w1_EFD", "w2_EDF", "w3_EFD"))
    each = [(torch.nn.functional.silu(x @ a.T) * (x @ c.T)) @ b.T for a, b, c in zip(w1, w2, w3, strict=True)]
    expected = sum(gates[..., i, None] * y for i, y in enumerate(each))
    torch.testing.assert_close(layer(x), expected, atol=0.05, rtol=0.05)  # torchtitan multiplies in bfloat16


@pytest.mark.filterwarnings("ignore")
def test_olmo_core_trains_with_expert_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("olmo_core", reason="OLMo-core is not installed; the example was run against 3.0.0")
    monkeypatch.syspath_prepend(ROOT / "examples")
    import olmo_core_router as ours

    config = ours.ThresholdRouterConfig(
        top_k=8, experts_per_token=2, warmup_steps=3, decay=0.5, gating_function="sigmoid"
    )
    router = config.build(32, 8)
    torch.nn.init.normal_(router.weight, std=0.2)
    weights: list[Tensor] = []

    def layer(x: Tensor) -> Tensor:
        found, ids, *_ = router(x)
        assert ids.sort(-1).values.diff(dim=-1).min() == 1
        weights.append(found)
        return found

    trained(router, layer, lambda: float((weights[-1] != 0).float().sum(-1).mean()))

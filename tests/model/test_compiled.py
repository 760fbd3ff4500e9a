"""The whole model, compiled to one graph, against the same model without compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from cases import TRAINED, small_model
from expert_threshold.model import GPT, TRUNKS
from expert_threshold.moe import Experts
from expert_threshold.moe.backends.grouped import grouped_backward, grouped_forward
from expert_threshold.routing import ExpertThreshold, Rule, TokenChoice

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's tracer

FAKE = ("test_schema", "test_faketensor")
RULES: dict[str, Rule | None] = TRAINED | {
    "trend": ExpertThreshold(4, warmup_steps=0, estimator="trend"),
    "expert_threshold_sequence": ExpertThreshold(4, 2, warmup_steps=1, pool="sequence"),
    "unbounded": ExpertThreshold(4, warmup_steps=1, capacity_slack=None),
    "global_aux": TokenChoice(4, 2, balance="global_aux"),
    "loss_free_proportional": TokenChoice(4, 2, balance="loss_free_proportional"),
}
FEW = ("dense", "token_choice_aux", "expert_choice_sequence", "expert_threshold", "unbounded")
"""Rules whose models `make test` compiles; it compiles the routing of all others in tests/routing/test_contract.py."""
OTHER_OPTIONS: dict[str, Any] = {"gate_norm": "fanout", "activation": "swiglu", "z_loss": 0.01}


def tiny(rule: Rule | None, dtype: torch.dtype = torch.float32, **options: Any) -> GPT:
    sizes = {"vocab_size": 64, "context": 16, "layers": 2, "d_model": 16, "kv_heads": 1, "d_expert": 32}
    return small_model(rule, steps=0, dtype=dtype, **(sizes | options)).train()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def losses_and_gradients(model: GPT, forward: Any) -> dict[str, Tensor]:
    """Run three steps, beyond the end of a warmup, that update only the states of the rules."""
    found = {}
    for step in range(3):
        model.zero_grad()
        output = forward(*batch(step))
        output.loss.backward()
        model.update_rules(output.observations)
        found[f"{step} loss"] = output.loss.detach()
        found |= {f"{step} {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()


def compiled(model: GPT) -> tuple[Any, CompileCounterWithBackend]:
    """Return the forward, compiled as in the trainer except for the backend, and a counter of its graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, fullgraph=True, dynamic=False, backend=counter), counter


TRUNK = TRUNKS["nanochat"] | {"key_offset": "all", "windows": "SL", "short_window": 5}
CASES = [
    *(pytest.param(rule, {}, id=name, marks=[pytest.mark.soak] * (name not in FEW)) for name, rule in RULES.items()),
    *(
        pytest.param(RULES["expert_threshold"], options, id=name)
        for name, options in (
            ("other options, grouped", OTHER_OPTIONS | {"dispatch": "grouped"}),
            ("other options, static", OTHER_OPTIONS | {"dispatch": "static"}),
            ("trunk", TRUNK),
            ("bfloat16 and checkpointing", {"dtype": torch.bfloat16}),
            ("kernels", {"dtype": torch.bfloat16, "d_model": 64}),  # whole tiles
        )
    ),
]


@pytest.mark.parametrize(("rule", "options"), CASES)
def test_the_whole_model_is_one_graph_whatever_the_loads(rule: Rule | None, options: dict[str, Any]) -> None:
    model, again = tiny(rule, **options), tiny(rule, **options)
    narrow = model.compute_dtype == torch.bfloat16
    model.activation_checkpointing = again.activation_checkpointing = narrow and not options.get("d_model")
    forward, counter = compiled(model)
    found = losses_and_gradients(model, forward)
    assert counter.frame_count == 1
    expected = losses_and_gradients(again, again)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name] - value).norm()
        assert error <= (0.05 if narrow else 2e-4) * value.norm() + 2e-6, f"{name}: {error}"


@pytest.mark.parametrize("activation", [pytest.param("relu2", marks=pytest.mark.soak), "swiglu"])
def test_without_gradients_it_is_one_graph_too(activation: str) -> None:
    model = tiny(RULES["expert_threshold"], activation=activation).eval()
    forward, counter = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(forward(batch(0)[0]).logits, model(batch(0)[0]).logits)
    assert counter.frame_count == 1


@pytest.mark.parametrize("shape", [(1, 12, 8), (3, 4, 8)])
def test_the_tracers_idea_of_the_grouped_operators_is_what_they_do(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape[0], shape[2], shape[1]).transpose(1, 2).flatten(0, 1).requires_grad_()
    experts, assignment = Experts(4, 8, 12), torch.rand(12, 4) < 0.5
    weights = [experts.down, experts.up]
    torch.library.opcheck(grouped_forward, (x, torch.rand(12, 4), assignment, weights, "relu2", 60), test_utils=FAKE)
    kept = torch.rand(60, 12)
    arguments = (x.detach(), x.detach(), torch.rand(12, 4), assignment, [w.detach() for w in weights], "relu2", kept)
    torch.library.opcheck(grouped_backward, arguments, test_utils=FAKE)


def test_too_few_slots_are_refused() -> None:
    experts, everywhere = Experts(4, 8, 12), torch.ones(3, 4, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="more token-expert pairs than 11 slots"):
        grouped_forward(torch.rand(3, 8), torch.rand(3, 4), everywhere, [experts.down, experts.up], "relu2", 11)


def train_on_tensors_without_data(model: GPT) -> None:
    """Run forward and backward. Tensors without data raise on anything that needs a value, such as `.item()`."""
    with FakeTensorMode() as mode:
        own = {name: mode.from_tensor(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
        output = torch.func.functional_call(model, own, tuple(map(mode.from_tensor, batch(0))))
        output.loss.backward()


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [(rule, torch.bfloat16) for name, rule in RULES.items() if name != "unbounded"]
    + [(RULES[name], torch.float32) for name in ("dense", "token_choice_aux", "expert_threshold")],
)
def test_forward_and_backward_wait_for_no_number_of_the_device(rule: Rule | None, dtype: torch.dtype) -> None:
    train_on_tensors_without_data(tiny(rule, dtype, dispatch="static"))


def test_grouped_waits_for_loads() -> None:
    with pytest.raises(DataDependentOutputException):
        train_on_tensors_without_data(tiny(RULES["expert_threshold"], dispatch="grouped"))

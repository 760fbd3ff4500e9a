"""Ways to compute a layer of experts, ours and others', each behind one call on the same tokens and weights.

A contestant computes y_t = Σ_i z[t,i] · g[t,i] · expert_i(x_t) of given assignment z and gates g: no router, no shared
expert. Where it can take any number of experts per token, z is expert threshold's; else it is the top k of the same
scores, k the mean fanout. Other people's code is called through its public interface, if it is installed.

Adapters were written without a GPU: ScatterMoE's was run in Triton's interpreter, MegaBlocks' there with its CUDA
operations replaced, both right; SonicMoE's was not run.
"""

from __future__ import annotations

import copy
import importlib.metadata
import os
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expert_threshold.moe import Experts, FeedForward, MoE, Router
from expert_threshold.moe.backends import BACKENDS, reference
from expert_threshold.routing import ExpertThreshold

BATCHED_MM_LIMIT = 2**28  # bytes of weights that `batched_mm` may copy, one matrix for every row
SETTLING_STEPS = 20
ALL_GRADIENTS = 64  # experts up to which weights' gradients are checked: the definition's cost is quadratic in them

INPUTS = ("x", "gates")
Outcome = dict[str, Tensor]  # "y", and the gradient of every leaf by its name


class UnavailableError(Exception):
    """A contestant cannot run here; the message says why, in one line."""


class Shape(NamedTuple):
    """experts_per_token · width is what a token gets; both may differ from shape to shape, their product need not."""

    name: str
    d_model: int
    width: int
    experts: int
    experts_per_token: int
    tokens: int

    def sizes(self) -> dict[str, int]:
        return {name: size for name, size in self._asdict().items() if name != "name"}


class Entry(NamedTuple):
    """A contestant made ready: forward() returns y (tokens, d_model).

    leaves: what gradients are taken of; INPUTS are inputs, the rest parameters. expected: what must come out, and what
    the leaves named there must get. loads: tokens of each expert. matrices: of an expert, d_model × width each.
    """

    forward: Callable[[], Tensor]
    leaves: dict[str, Tensor]
    expected: Outcome
    loads: Tensor
    width: int
    matrices: int = 2


class Case:
    """One shape on one device: tokens, weights, expert threshold's assignment and the top k of the same scores.

    Cutoffs have settled on other tokens, so loads vary by chance, as they do in training.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        torch.manual_seed(0)
        self.rule = ExpertThreshold(shape.experts, shape.experts_per_token, decay=0.9, warmup_steps=0)
        with device:
            router = Router(shape.d_model, self.rule)
            self.weights = Experts(shape.experts, shape.d_model, shape.width).to(dtype)
        with torch.no_grad():
            for _ in range(SETTLING_STEPS):
                router.update(router(self._tokens()[None]).observation)
            self.x = self._tokens().requires_grad_()
            self.grad = self._tokens()
            self.routing = router(self.x[None])
        self.assignment = self.routing.assignment[0]
        self.scores = self.routing.scores[0]
        self.top = self.scores.topk(shape.experts_per_token).indices

    def _tokens(self) -> Tensor:
        return torch.randn(self.shape.tokens, self.shape.d_model, device=self.device).to(self.dtype)

    def gates(self) -> Tensor:
        """(tokens, experts) float32, a leaf."""
        return self.scores.sigmoid().requires_grad_()

    def top_gates(self) -> Tensor:
        """(tokens, k) in the compute dtype, a leaf."""
        return self.scores.sigmoid().gather(1, self.top).to(self.dtype).requires_grad_()

    def outcome(self, forward: Callable[[], Tensor], leaves: dict[str, Tensor]) -> Outcome:
        y = forward()
        grads = torch.autograd.grad(y, list(leaves.values()), self.grad.to(y.dtype))
        return {"y": y.detach()} | dict(zip(leaves, grads, strict=True))

    def _reference(self, gates: Tensor, dense_gates: Callable[[Tensor], Tensor], assignment: Tensor) -> Outcome:
        """Computes the definition in float32."""
        x, gates = (t.detach().float().requires_grad_() for t in (self.x, gates))
        experts = copy.deepcopy(self.weights).float().requires_grad_(self.shape.experts <= ALL_GRADIENTS)
        leaves = {"x": x, "gates": gates}
        if experts.up.requires_grad:
            leaves |= {"up": experts.up, "down": experts.down}
        return self.outcome(lambda: reference(x, dense_gates(gates), assignment, experts), leaves)

    @cached_property
    def of_any_fanout(self) -> Outcome:
        """The outcome of expert threshold's assignment."""
        return self._reference(self.gates(), lambda gates: gates, self.assignment)

    @cached_property
    def of_top_k(self) -> Outcome:
        """The outcome of the top k."""
        nothing = torch.zeros_like(self.scores)
        chosen = nothing.bool().scatter(1, self.top, True)
        return self._reference(self.top_gates(), lambda gates: nothing.scatter(1, self.top, gates), chosen)

    def any_fanout(self, forward: Callable[[Tensor], Tensor]) -> Entry:
        """Return the entry of a forward that is given `gates`, for expert threshold's assignment."""
        return self._entry(forward, self.gates(), self.of_any_fanout, self.assignment.sum(0), {})

    def top_k(self, forward: Callable[[Tensor], Tensor], **weights: Tensor) -> Entry:
        """Return the entry of a forward that is given `top_gates`; weights: what it has in the place of ours."""
        loads = self.top.flatten().bincount(minlength=self.shape.experts)
        return self._entry(forward, self.top_gates(), self.of_top_k, loads, weights)

    def _entry(
        self, forward: Callable[[Tensor], Tensor], gates: Tensor, expected: Outcome, loads: Tensor, weights: Outcome
    ) -> Entry:
        leaves = {"x": self.x, "gates": gates} | (weights or {"up": self.weights.up, "down": self.weights.down})
        return Entry(lambda: forward(gates), leaves, expected, loads, self.shape.width)


class PlainFeedForward(nn.Module):
    """down(relu(up x)²) as one would write it first."""

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_hidden, bias=False)
        self.down = nn.Linear(d_hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu().square())
        return y


def dense(kind: type[PlainFeedForward | FeedForward]) -> Callable[[Case], Entry]:
    """A feed-forward as wide as the experts that a token gets on average."""

    def make(case: Case) -> Entry:
        shape, width = case.shape, case.shape.experts_per_token * case.shape.width
        torch.manual_seed(1)
        with case.device:
            layer, exact = kind(shape.d_model, width).to(case.dtype), PlainFeedForward(shape.d_model, width)
        x = case.x.detach().float().requires_grad_()
        exact.load_state_dict(layer.state_dict())
        expected = case.outcome(lambda: exact(x), {"x": x} | dict(exact.named_parameters()))
        leaves = {"x": case.x} | dict(layer.named_parameters())
        return Entry(lambda: layer(case.x), leaves, expected, torch.tensor([shape.tokens]), width)

    return make


def plain_loop(case: Case) -> Entry:
    """Eq. 2 of the paper: a boolean mask for each expert, its rows, two products, index_add."""
    up, down = case.weights.up, case.weights.down

    def forward(gates: Tensor) -> Tensor:
        y = torch.zeros_like(case.x)
        for i, (expert_up, expert_down) in enumerate(zip(up.unbind(), down.unbind(), strict=True)):
            mask = case.assignment[:, i]
            out = F.linear(F.linear(case.x[mask], expert_up).relu().square(), expert_down)
            y = y.index_add(0, mask.nonzero()[:, 0], out * gates[mask, i, None].to(out.dtype))
        return y

    return case.any_fanout(forward)


def plain_grouped_mm(case: Case) -> Entry:
    """Pairs ordered by expert, rows gathered, `F.grouped_mm`, relu², `F.grouped_mm`, gates, index_add."""
    up, down = case.weights.up, case.weights.down

    def forward(gates: Tensor) -> Tensor:
        expert, token = case.assignment.T.nonzero().unbind(1)
        ends = case.assignment.sum(0).cumsum(0).int()
        h = F.grouped_mm(case.x[token], up.mT, offs=ends).relu().square()
        out = F.grouped_mm(h, down.mT, offs=ends)
        return torch.zeros_like(case.x).index_add(0, token, out * gates[token, expert, None].to(out.dtype))

    return case.any_fanout(forward)


def ours(name: str) -> Callable[[Case], Entry]:
    """The layer with the backend of that name, buffers of a static size where it has them, as in training."""

    def make(case: Case) -> Entry:
        shape = case.shape
        with torch.device("meta"):
            layer = MoE(shape.d_model, shape.width, case.rule, shared_experts=0, dispatch=name)
        layer.experts = case.weights
        return case.any_fanout(lambda gates: layer.compute(case.x[None], case.routing._replace(gates=gates[None]))[0])

    return make


def transformers_backend(name: str) -> Callable[[Case], Entry]:
    """transformers' experts of Nemotron-H, whose function is ours, under one of its `experts_implementation`s."""

    def make(case: Case) -> Entry:
        try:
            from transformers import NemotronHConfig
            from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
        except ImportError:
            raise UnavailableError("not installed; pip install 'transformers>=5'") from None
        shape = case.shape
        copied = case.top.numel() * shape.d_model * shape.width * case.x.element_size()
        if name == "batched_mm" and copied > BATCHED_MM_LIMIT:
            raise UnavailableError(
                f"copies a matrix for every row, over {BATCHED_MM_LIMIT >> 20} MiB; it is for decoding"
            )
        config = NemotronHConfig(
            hidden_size=shape.d_model,
            n_routed_experts=shape.experts,
            moe_intermediate_size=shape.width,
            mlp_hidden_act="relu2",
        )
        config._experts_implementation = name
        with torch.device("meta"):
            layer = NemotronHExperts(config)
        layer.up_proj, layer.down_proj = case.weights.up, case.weights.down
        return case.top_k(lambda gates: layer(case.x, case.top, gates))

    return make


def scattermoe(case: Case) -> Entry:
    """shawntan/scattermoe 0.3: `MLP`, top k."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        require_gpu(case)
    try:
        from scattermoe.mlp import MLP
    except ImportError:
        raise UnavailableError("not installed; pip install git+https://github.com/shawntan/scattermoe") from None
    shape = case.shape
    with torch.device("meta"):
        layer = MLP(shape.d_model, shape.width, shape.experts, shape.experts_per_token, activation=relu_squared)
    layer.experts.weight, layer.output_experts.weight = case.weights.up, case.weights.down
    return case.top_k(lambda gates: layer(case.x, gates, case.top))


def megablocks(case: Case) -> Entry:
    """databricks/megablocks 0.10: the dropless layer on grouped_gemm, memory-optimised, top k."""
    require_gpu(case)
    if case.dtype != torch.bfloat16:
        raise UnavailableError("computes in bfloat16 only; use --dtype bfloat16")
    try:
        from megablocks.layers.arguments import Arguments
        from megablocks.layers.dmoe import ParallelDroplessMLP
    except ImportError:
        raise UnavailableError("not installed; pip install 'megablocks[gg]' (torch 2.7.0)") from None
    shape = case.shape
    arguments = Arguments(
        hidden_size=shape.d_model,
        ffn_hidden_size=shape.width,
        bias=False,
        return_bias=False,
        activation_fn=relu_squared,
        moe_num_experts=shape.experts,
        moe_top_k=shape.experts_per_token,
        moe_loss_weight=0.0,
        memory_optimized_mlp=True,
        mlp_impl="grouped",
        fp16=False,
        bf16=True,
        device=case.device,
    )
    layer = ParallelDroplessMLP(arguments)
    with torch.no_grad():
        layer.mlp.w1.copy_(case.weights.up.flatten(0, 1))
        layer.mlp.w2.copy_(case.weights.down.mT.flatten(0, 1))
    weights = {"w1": layer.mlp.w1, "w2": layer.mlp.w2}
    return case.top_k(lambda gates: layer(case.x[None], None, gates, case.top)[0], **weights)


def sonicmoe(case: Case) -> Entry:
    """Dao-AILab/sonic-moe 0.1.2: any fanout, but gated experts only, so SwiGLU of three matrices of 2/3 the width."""
    require_gpu(case, (9, 0), "a Hopper GPU")
    try:
        from sonicmoe import moe_general_routing_inputs
        from sonicmoe.enums import ActivationType
    except ImportError:
        raise UnavailableError("not installed; pip install sonic-moe (Python >= 3.12, CUDA >= 12.9)") from None
    shape = case.shape
    width = max(round(shape.width * 2 / 3 / 64) * 64, 64)
    with case.device:
        experts = Experts(shape.experts, shape.d_model, width, "swiglu").to(case.dtype)
    up = torch.stack((experts.gate, experts.up), 2).flatten(1, 2).detach().requires_grad_()  # rows of both in turn
    gates, exact, x = case.gates(), copy.deepcopy(experts).float(), case.x.detach().float().requires_grad_()
    exact_gates = case.gates()
    leaves = {"x": x, "gates": exact_gates, "down": exact.down}
    expected = case.outcome(lambda: reference(x, exact_gates, case.assignment, exact), leaves)

    def forward() -> Tensor:
        token, expert = case.assignment.nonzero().int().unbind(1)
        y: Tensor = moe_general_routing_inputs(
            case.x,
            gates[case.assignment],
            token.contiguous(),
            expert.contiguous(),
            up.permute(1, 2, 0),
            None,
            experts.down.permute(1, 2, 0),
            None,
            shape.experts,
            torch.cuda.current_stream().cuda_stream,
            ActivationType.SWIGLU,
        )[0]
        return y

    leaves = {"x": case.x, "gates": gates, "up": up, "down": experts.down}
    return Entry(forward, leaves, expected, case.assignment.sum(0), width, matrices=3)


def relu_squared(h: Tensor) -> Tensor:
    return h.relu().square()


def require_gpu(case: Case, capability: tuple[int, int] = (7, 0), name: str = "a CUDA GPU") -> None:
    if case.device.type != "cuda" or torch.cuda.get_device_capability(case.device) < capability:
        raise UnavailableError(f"needs {name}")


def transformers_backends() -> list[str]:
    """Return transformers' registered backends; without transformers 'grouped_mm' alone, to be listed as missing."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return ["grouped_mm"]
    return ["eager", *sorted(ALL_EXPERTS_FUNCTIONS.valid_keys())]


def contestants() -> dict[str, Callable[[Case], Entry]]:
    """Return the contestants by name, in the order of the tables."""
    return {
        "dense": dense(PlainFeedForward),
        "dense (ours)": dense(FeedForward),
        "plain loop": plain_loop,
        "plain grouped_mm": plain_grouped_mm,
        **{f"transformers {name}": transformers_backend(name) for name in transformers_backends()},
        "scattermoe": scattermoe,
        "megablocks": megablocks,
        "sonicmoe": sonicmoe,
        **{f"ours {name}": ours(name) for name in BACKENDS if name != "auto"},
    }


UNTRIED = {
    "scattermoe": "adapter run in Triton's interpreter only",
    "megablocks": "adapter run in Triton's interpreter only, CUDA operations replaced",
    "sonicmoe": "adapter not run here",
}


def version(name: str) -> dict[str, Any]:
    """Return the version of the contestant's package, nothing for our own."""
    package = {"sonicmoe": "sonic-moe"}.get(name, name.split(" ")[0])
    if package in ("dense", "plain", "ours"):
        return {}
    try:
        return {"package": f"{package} {importlib.metadata.version(package)}"}
    except importlib.metadata.PackageNotFoundError:
        return {}

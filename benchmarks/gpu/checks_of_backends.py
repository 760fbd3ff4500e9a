"""Every backend and every rule through it, against the definition in float64, gradients too."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from expert_threshold.moe import BACKENDS, Experts, MoE
from expert_threshold.moe.backends import reference
from expert_threshold.routing import RULES, Rule
from routed_sum import ASSIGNMENTS, EXPERTS, RoutedSum, outputs_and_gradients
from routed_sum import Case as Given
from routed_sum import case as given_case

from .setting import Case, NotRunError, Row, Setting

NAMES = ("grouped", "static", "triton")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Largest error relative to a tensor's norm. bfloat16 rounds to 2⁻⁹ a few times in turn; float32 runs without TF32."""
FEW = 1e-30


def cases(setting: Setting) -> Iterator[Case]:
    """Yield backends, rules through backends, equal bits in two runs, rows alone and among others."""
    for name in NAMES:
        for dtype in TOLERANCE:
            short = str(dtype).removeprefix("torch.")
            yield Case(f"backend {name} {short}", lambda n=name, d=dtype: backend(n, d, setting), 15)
        yield Case(f"same bits twice {name}", lambda n=name: same_bits_twice(n, setting), 3)
        yield Case(f"rows alone {name}", lambda n=name: rows_alone(n, setting), 3)
    for name in NAMES:
        yield Case(f"rules through {name}", lambda n=name: rules_through(n, setting), 15)


def sizes(setting: Setting) -> dict[str, int]:
    """Return widths that are whole tiles on a card."""
    return setting.pick({"d_model": 256, "d_expert": 512}, {"d_model": 16, "d_expert": 32})


def assignments(setting: Setting) -> dict[str, Tensor]:
    """Return those of the tests, and large ones whose loads are unequal: ragged, most empty, one overfull.

    All have the same number of experts, for each of which kernels are compiled anew.
    """
    tokens, experts = setting.pick(4096, 24), EXPERTS
    chance = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0))
    few = torch.arange(experts) < 1
    small = {name: given for name, given in ASSIGNMENTS.items() if given.shape[1] == experts}
    small = dict(list(small.items())[: setting.pick(None, 5)])
    return {
        **small,
        "ragged": chance < torch.linspace(0.01, 0.5, experts),
        "most experts empty": (chance < 0.5) & few,
        "one expert overfull": (chance < 0.02) | (torch.arange(experts) == 3),
    }


def on(given: Given, dtype: torch.dtype, setting: Setting) -> Given:
    """Return the case on the device, with numbers that `dtype` holds exactly, so that only arithmetic rounds."""
    given = Given(*(value.to(setting.device) for value in given))
    with torch.no_grad():
        for weight in given.experts.parameters():
            weight.copy_(weight.to(dtype))
    return given._replace(x=given.x.to(dtype), upstream=given.upstream.to(dtype))


def require_available(name: str, given: Given) -> None:
    """Raises NotRunError if the backend cannot run here."""
    if (why := BACKENDS[name].why_not(given.x, given.experts)) is not None:
        raise NotRunError(why)


def in_float64(given: Given) -> dict[str, Tensor]:
    """Return the definition's output and gradients."""
    wide = given._replace(x=given.x.double(), upstream=given.upstream.double(), gates=given.gates.double())
    wide = wide._replace(experts=copy.deepcopy(given.experts).double())
    return outputs_and_gradients(reference, wide)


def error(found: Tensor, exact: Tensor) -> float:
    """Return ‖found − exact‖ / ‖exact‖; absolute where the exact one is zero; NaN is infinite."""
    far, size = float((found.double() - exact.double()).norm()), float(exact.double().norm())
    return (far / size if size > FEW else far) if math.isfinite(far) else math.inf


@contextmanager
def deterministic() -> Iterator[None]:
    """Algorithms are deterministic where there are such; whatever torch.empty and its like return holds NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def padded(name: str, rows: int) -> RoutedSum:
    """Return the backend with buffers of `rows` rows more than are needed."""

    def call(x: Tensor, gates: Tensor, assignment: Tensor, experts: Experts) -> Tensor:
        return BACKENDS[name](x, gates, assignment, experts, rows=int(assignment.sum()) + rows)

    return call


def backend(name: str, dtype: torch.dtype, setting: Setting) -> Row:
    """Compare with float64 for every assignment and activation, in memory that holds NaN, with padding and without."""
    worst, checked = 0.0, 0
    every = assignments(setting)
    interpreted = name == "triton" and not setting.cuda  # which is slow
    for told in ["ragged"] if interpreted else [*every]:
        assignment = every[told]
        for activation in ("swiglu",) if interpreted else ("relu2", "swiglu"):
            given = on(given_case(assignment, activation, **sizes(setting)), dtype, setting)  # type: ignore[arg-type]
            require_available(name, given)
            exact = in_float64(given)
            # No rule asks for rows without a token.
            for padding in (19,) if interpreted else (0, 19) if len(given.x) else (0,):
                with deterministic():
                    found = outputs_and_gradients(padded(name, padding), given)
                for tensor, expected in exact.items():
                    off = error(found[tensor], expected)
                    assert off <= TOLERANCE[dtype], (
                        f"{told}, {activation}, padding {padding}: {tensor} off by {off:.2g}"
                    )
                    worst, checked = max(worst, off), checked + 1
    return {"checked": checked, "error": worst}


def ragged(setting: Setting) -> Given:
    return on(given_case(assignments(setting)["ragged"], **sizes(setting)), torch.bfloat16, setting)


def same_bits_twice(name: str, setting: Setting) -> Row:
    """Run twice; every output and gradient must have the same bits."""
    given = ragged(setting)
    require_available(name, given)
    once, again = (outputs_and_gradients(padded(name, 19), given) for _ in range(2))
    different = [tensor for tensor in once if not torch.equal(once[tensor], again[tensor])]
    assert not different, f"two runs differ in {', '.join(different)}"
    return {"checked": len(once)}


def rows_alone(name: str, setting: Setting) -> Row:
    """Compute some rows alone: output and the gradients of x and gates must have the bits they have among others.

    Our Triton kernels promise this; of the others it is told.
    """
    given = ragged(setting)
    require_available(name, given)
    together = outputs_and_gradients(padded(name, 0), given)
    rows = [int(row) for row in given.assignment.any(1).nonzero()[:: setting.pick(len(given.x) // 8, 24), 0]]
    different = set()
    for row in rows:
        own = slice(row, row + 1)
        alone = given._replace(**{n: getattr(given, n)[own] for n in ("x", "gates", "assignment", "upstream")})
        found = outputs_and_gradients(padded(name, 0), alone)
        different |= {tensor for tensor in ("y", "x", "gates") if not torch.equal(found[tensor], together[tensor][own])}
    promised = name == "triton" and setting.cuda
    assert not (promised and different), f"rows alone differ in {', '.join(sorted(different))}"
    return {"checked": 3 * len(rows), "different": sorted(different)}


def rules_through(name: str, setting: Setting) -> Row:
    """Compare a layer under every registered rule with the definition in float64: output, input, all weights."""
    worst, checked = 0.0, 0
    every = [(f"{rule}, {told}", r) for rule, cls in RULES.items() for told, r in cls.cases().items()]
    for told, rule in every if not setting.dry else every[:: 80 if name == "triton" else 6]:
        for dtype in TOLERANCE if setting.cuda else (torch.float32,):
            fast, exact = (layer(rule, which, dtype, setting) for which in (name, "reference"))
            x = torch.randn(4, 48, sizes(setting)["d_model"], generator=torch.Generator().manual_seed(1))
            x = x.to(setting.device, dtype)
            gradient = torch.randn_like(x)
            if (why := fast.dispatch.why_not(x, fast.experts)) is not None:
                raise NotRunError(why)
            found, expected = outcome(fast, x, gradient), outcome(exact, x.double(), gradient.double())
            for tensor, value in expected.items():
                off = error(found[tensor], value)
                assert off <= TOLERANCE[dtype], f"{told}, {dtype}: {tensor} off by {off:.2g}"
                worst, checked = max(worst, off), checked + 1
    return {"checked": checked, "error": worst, "rules": len(every)}


def layer(rule: Rule, dispatch: str, dtype: torch.dtype, setting: Setting) -> MoE:
    """Return a layer with weights that `dtype` holds exactly, without a shared expert."""
    torch.manual_seed(0)
    made = MoE(*sizes(setting).values(), rule, shared_experts=0, dispatch=dispatch)
    with torch.no_grad():
        for weight in made.experts.parameters():
            weight.copy_(weight.to(dtype))
    return made.to(setting.device)


def outcome(made: MoE, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """Return a layer's output and all gradients. Scores are float32 whatever the dtype of x: all see one assignment."""
    x = x.clone().requires_grad_()
    y = made(x)[0]
    names, weights = zip(*((n, p) for n, p in made.named_parameters()), strict=True)
    grads = torch.autograd.grad(y, (x, *weights), gradient, allow_unused=True)
    return {"y": y.detach()} | {n: g for n, g in zip(("x", *names), grads, strict=True) if g is not None}

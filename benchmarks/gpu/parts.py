"""Parts of a step, each beside the least time that its FLOPs and its bytes need at the rates measured beside it.

FLOPs and bytes are counted from shapes: each input is read once, each output written once. Nothing that an
implementation keeps or computes again counts, so these are the least that any could do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from expert_threshold.model import GPT
from expert_threshold.model.attention import attend
from expert_threshold.model.cross_entropy import linear_cross_entropy
from expert_threshold.optim import OptimConfig, make_optimizers
from expert_threshold.routing import Routing, Rule, kth_largest
from expert_threshold.routing.selection import _kth_largest_by_sorting, runs_on_kernels

from .roof import beside_floor, captured, under_roof
from .setting import Case, Row, Setting
from .whole import RULES, config_of

D_MODELS = {"d20": 1280, "d12": 768}
HEAD_DIM = 128
FLOAT, HALF = 4, 2  # bytes of float32, of bfloat16


def cases(setting: Setting) -> Iterator[Case]:
    """Yield the parts at d20's and d12's sizes, 65,536 tokens."""
    tokens, context = setting.pick(65_536, 256), setting.pick(2048, 32)
    for size, experts in setting.pick(((tokens, 16), (tokens, 256), (8 * tokens, 16)), ((tokens, 4),)):
        yield Case(f"selection {size} × {experts}", lambda s=size, e=experts: selection(s, e, setting), 4)
    for name, rule in RULES.items():
        if rule is not None:
            yield Case(f"rule {name}", lambda r=rule: of_one_rule(r, tokens // context, context, setting), 4)
    for preset, d_model in D_MODELS.items():
        d, words = setting.pick((d_model, 65_536), (32, 96))
        yield Case(f"cross-entropy {preset}", lambda d=d, w=words: cross_entropy(tokens, w, d, setting), 5)
        heads, width = setting.pick((d_model // HEAD_DIM, HEAD_DIM), (2, 16))
        shape = (tokens // context, heads, context, width)
        yield Case(f"attention {preset}", lambda s=shape: attention(s, setting), 5)
        for kind in ("muon", "adamw"):
            yield Case(f"{kind} {preset}", lambda p=preset, k=kind: optimizer(p, k, setting), 8)


def timed(call: object, flops: float, size: float, setting: Setting, **more: object) -> Row:
    """Return a call's median time beside its floor of FLOPs and bytes, and other calls' times beside it, as NAME_ms."""
    medians, roof = under_roof({"": call, **more}, setting)  # type: ignore[dict-item]
    others = {f"{name}_ms": round(medians[name] * 1e3, 4) for name in more}
    return beside_floor(medians[""], flops, size, roof) | others


def selection(tokens: int, experts: int, setting: Setting) -> Row:
    """The k-th largest score of every expert, beside sorting; `bounds` finds three at once. Comparing is no FLOP."""
    scores = torch.randn(1, tokens, experts, device=setting.device)
    k = max(tokens // experts, 1)
    others = {
        "bounds": lambda: kth_largest(scores, [k, k // 2, k + k // 2]),
        "sort": lambda: _kth_largest_by_sorting(scores, [k]),
    }
    if runs_on_kernels(scores):
        others["captured"] = captured(lambda: kth_largest(scores, [k]), setting)
    return timed(lambda: kth_largest(scores, [k]), 0, scores.nbytes, setting, **others)


def of_one_rule(rule: Rule, batch: int, time: int, setting: Setting) -> Row:
    """All that a rule does in one layer of a training step: routing, its gradient, its update.

    Scores in, gates and the assignment out, the gates' gradients in, the scores' out.
    """
    _, step = rule_calls(rule, batch, time, setting)
    return timed(step, 0, (4 * FLOAT + 1) * batch * time * rule.num_scores, setting)


def rule_calls(
    rule: Rule, batch: int, time: int, setting: Setting
) -> tuple[Callable[[], Routing], Callable[[], object]]:
    """Return two calls: routing in training, and all that a rule does in one layer of a training step."""
    scores = torch.randn(batch, time, rule.num_scores, device=setting.device, requires_grad=True)
    state = type(rule.init())(*(tensor.to(setting.device) for tensor in rule.init()))
    for _ in range(3):
        state = rule.update(state, rule.route(scores.detach(), state, training=True).observation)
    gradient = torch.randn(batch, time, rule.num_experts, device=setting.device)

    def route() -> Routing:
        return rule.route(scores, state, training=True)

    def step() -> object:
        routing = route()
        others = [more.sum() for more in (routing.loss, routing.passthrough) if more is not None]
        outputs = [routing.gates[..., : rule.num_experts], *others]
        torch.autograd.grad(outputs, scores, [gradient, *map(torch.ones_like, others)])
        return rule.update(state, routing.observation)

    return route, step


def cross_entropy(tokens: int, words: int, d_model: int, setting: Setting) -> Row:
    """The head's loss with the gradients of its input and its weights, beside other packages'.

    The products are x Wᵀ, dx and dW. x and its gradient are bfloat16, the head and its gradient float32; logits need
    not leave the chip.
    """
    x = torch.randn(tokens, d_model, device=setting.device, dtype=setting.dtype, requires_grad=True)
    weight = (torch.randn(words, d_model, device=setting.device) * d_model**-0.5).requires_grad_()
    targets = torch.randint(words, (tokens,), device=setting.device)

    def gradients_of(loss: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        value = loss(x, weight, targets)
        return value.detach(), *torch.autograd.grad(value, (x, weight))

    ours = functools.partial(gradients_of, lambda *given: linear_cross_entropy(*given, SOFTCAP).mean)
    calls = {name: functools.partial(gradients_of, loss) for name, loss in HEADS.items()}
    found: Row = {}
    mine = ours()
    for name in list(calls):
        try:
            peers = calls[name]()
        except Exception as failure:  # absent, or no kernel for this device
            found[f"{name}_reason"] = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
            del calls[name]
        else:
            found[f"{name}_error"] = max(float((a - b).norm() / b.norm()) for a, b in zip(peers, mine, strict=True))
            del peers
    del mine
    flops, size = 3 * 2 * tokens * words * d_model, 2 * HALF * tokens * d_model + 2 * FLOAT * words * d_model
    return timed(ours, flops, size, setting, **calls) | found


def _cut(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    value: Tensor = linear_cross_entropy(x, weight.to(x.dtype), targets, softcap=SOFTCAP)
    return value


def _liger(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    head, options = weight.to(x.dtype), {"softcap": SOFTCAP, "accum_dtype": torch.float32}
    value: Tensor = liger_fused_linear_cross_entropy(x, head, targets, **options)
    return value


HEADS = {"cut": _cut, "liger": _liger}
SOFTCAP = 15.0


def attention(shape: tuple[int, int, int, int], setting: Setting) -> Row:
    """Causal attention (batch, heads, time, head_dim) with its gradients, projections left out.

    2 products in forward and 4 in backward, each of 2 · head_dim for every query and each of the (time + 1) / 2 keys
    that it meets on average, as `flops_per_token` counts. q, k, v and the output once in forward; in backward these
    four again, the output's gradient and three.
    """
    q, k, v = (torch.randn(shape, device=setting.device, dtype=setting.dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device=setting.device, dtype=setting.dtype)
    flops = 6 * q.numel() * (shape[2] + 1)
    return timed(lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), gradient), flops, (4 + 8) * q.nbytes, setting)


def optimizer(preset: str, kind: str, setting: Setting) -> Row:
    """A step of all parameters of one optimizer, with expert threshold's 16 experts.

    Muon's gradient in, momentum and weight in and out; AdamW's gradient in, weight and two moments in and out.
    """
    with torch.device("meta"):
        model = GPT(config_of(preset, RULES["expert_threshold"], setting))
    groups = make_optimizers(model.named_parameters(), OptimConfig(), 768).groups
    names = {name for group in groups.values() if group.kind == kind for name in group.parameters}
    parameters = {
        name: nn.Parameter(torch.randn(meta.shape, device=setting.device))
        for name, meta in model.named_parameters()
        if name in names
    }
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizers = make_optimizers(parameters.items(), OptimConfig(), 768)
    numbers = sum(parameter.numel() for parameter in parameters.values())
    flops = sum(map(newton_schulz_flops, parameters.values())) if kind == "muon" else 0
    size = (5 if kind == "muon" else 7) * FLOAT * numbers
    return timed(lambda: optimizers.step(0, 100), flops, size, setting)


def newton_schulz_flops(parameter: Tensor) -> int:
    """Operations of the products: X Xᵀ, its square, and the polynomial times X, from the smaller side."""
    small, large = sorted(parameter.shape[-2:])
    matrices = parameter.numel() // (small * large)
    return matrices * OptimConfig().ns_steps * (2 * small**2 * large + 2 * small**3 + 2 * small**2 * large)


def lines(rows: dict[str, Row]) -> list[str]:
    """Return each part's time and how many times its floor that is."""
    kinds: dict[str, list[str]] = {}
    for name, row in rows.items():
        kind, _, which = name.partition(" ")
        others = "".join(f", {other} {row[f'{other}_ms']:.3g}" for other in ("sort", *HEADS) if f"{other}_ms" in row)
        kinds.setdefault(kind, []).append(f"{which} {row['ms']:.3g} ms ({row['over_floor']:.3g} ×{others})")
    return [f"{kind} (× its floor): {'; '.join(parts)}" for kind, parts in kinds.items()]

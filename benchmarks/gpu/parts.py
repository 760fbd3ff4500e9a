"""Parts of a step, each beside the least time that its FLOPs and its bytes need at the rates measured beside it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from expert_threshold.model import GPT
from expert_threshold.model.attention import attend
from expert_threshold.model.cross_entropy import linear_cross_entropy
from expert_threshold.optim import OptimConfig, make_optimizers
from expert_threshold.routing import Rule, kth_largest
from expert_threshold.routing.selection import _kth_largest_by_sorting, runs_on_kernels

from .roof import FLOOR_FIELDS, Work, beside_floor, captured, under_roof
from .setting import Case, Row, Setting
from .whole import RULES, config_of
from .work import of_adamw, of_attention, of_cross_entropy, of_muon, of_rule, of_selection

FIELDS = FLOOR_FIELDS
D_MODELS = {"d20": 1280, "d12": 768}
HEAD_DIM = 128


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


def timed(call: object, work: Work, setting: Setting, **more: object) -> Row:
    """Return a call's median time beside its floor, and those of others beside it, as NAME_ms."""
    medians, roof = under_roof({"": call, **more}, setting)  # type: ignore[dict-item]
    others = {f"{name}_ms": round(medians[name] * 1e3, 4) for name in more}
    return beside_floor(medians[""], work, roof) | others


def selection(tokens: int, experts: int, setting: Setting) -> Row:
    """The k-th largest score of every expert, beside sorting; `bounds` finds three at once."""
    scores = torch.randn(1, tokens, experts, device=setting.device)
    k = max(tokens // experts, 1)
    others = {
        "bounds": lambda: kth_largest(scores, [k, k // 2, k + k // 2]),
        "sort": lambda: _kth_largest_by_sorting(scores, [k]),
    }
    if runs_on_kernels(scores):
        others["captured"] = captured(lambda: kth_largest(scores, [k]), setting)
    return timed(lambda: kth_largest(scores, [k]), of_selection(tokens, experts), setting, **others)


def of_one_rule(rule: Rule, batch: int, time: int, setting: Setting) -> Row:
    """All that a rule does in one layer of a training step: routing, its gradient, its update."""
    call, scores = rule_call(rule, batch, time, setting)
    return timed(call, of_rule(scores.shape[0] * scores.shape[1], rule.num_scores), setting)


def rule_call(rule: Rule, batch: int, time: int, setting: Setting) -> tuple[object, Tensor]:
    """Return what a rule does in one layer of a training step, as a call, and the scores it sees."""
    scores = torch.randn(batch, time, rule.num_scores, device=setting.device, requires_grad=True)
    state = type(rule.init())(*(tensor.to(setting.device) for tensor in rule.init()))
    for _ in range(3):
        state = rule.update(state, rule.route(scores.detach(), state, training=True).observation)
    gradient = torch.randn(batch, time, rule.num_experts, device=setting.device)

    def call() -> None:
        routing = rule.route(scores, state, training=True)
        torch.autograd.grad(routing.gates[..., : rule.num_experts], scores, gradient)
        rule.update(state, routing.observation)

    return call, scores


def cross_entropy(tokens: int, words: int, d_model: int, setting: Setting) -> Row:
    """The head's loss with the gradients of its input and its weights."""
    x = torch.randn(tokens, d_model, device=setting.device, dtype=setting.dtype, requires_grad=True)
    weight = (torch.randn(words, d_model, device=setting.device) * d_model**-0.5).requires_grad_()
    targets = torch.randint(words, (tokens,), device=setting.device)

    def call() -> None:
        torch.autograd.grad(linear_cross_entropy(x, weight, targets, 15.0).mean, (x, weight))

    return timed(call, of_cross_entropy(tokens, words, d_model), setting)


def attention(shape: tuple[int, int, int, int], setting: Setting) -> Row:
    """Causal attention (batch, heads, time, head_dim) with its gradients, projections left out."""
    q, k, v = (torch.randn(shape, device=setting.device, dtype=setting.dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device=setting.device, dtype=setting.dtype)
    return timed(lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), gradient), of_attention(*shape), setting)


def optimizer(preset: str, kind: str, setting: Setting) -> Row:
    """A step of all parameters of one optimizer, with expert threshold's 16 experts."""
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in GPT(config_of(preset, RULES["expert_threshold"], setting)).named_parameters()}
    config = OptimConfig()
    groups = make_optimizers(
        ((n, nn.Parameter(torch.empty(shape, device="meta"))) for n, shape in shapes.items()), config, 768
    ).groups
    names = [name for group in groups.values() if group.kind == kind for name in group.parameters]
    parameters = {name: nn.Parameter(torch.randn(shapes[name], device=setting.device)) for name in names}
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizers = make_optimizers(parameters.items(), config, 768)
    every = list(parameters.values())
    work = of_muon(every, config.ns_steps) if kind == "muon" else of_adamw(every)
    return timed(lambda: optimizers.step(0, 100), work, setting)


def lines(rows: dict[str, Row]) -> list[str]:
    """Return each part's time and how many times its floor that is."""
    kinds: dict[str, list[str]] = {}
    for name, row in rows.items():
        kind, _, which = name.partition(" ")
        sorting = f", sorting {row['sort_ms']:.3g}" if "sort_ms" in row else ""
        kinds.setdefault(kind, []).append(f"{which} {row['ms']:.3g} ms ({row['over_floor']:.3g} ×{sorting})")
    return [f"{kind} (× its floor): {'; '.join(told)}" for kind, told in kinds.items()]

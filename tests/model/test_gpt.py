"""The whole model: its size, its start, its causality, its cache, its losses."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import PIECES, TRAINED, small_config, small_model
from expert_threshold.model import GPT, PRESETS, GPTConfig, flops_per_token, parameter_counts
from expert_threshold.moe import MoE
from expert_threshold.routing import ExpertThreshold, Rule, SeqTopK, TokenChoice
from expert_threshold.testing import same

VOCAB, CONTEXT = 61, 16
RULES = TRAINED | {"warmup": ExpertThreshold(4, 1, warmup_steps=99, decay=0.5)}
RULES |= {"seq_top_k": SeqTopK(4, 1.5, gate="softmax_chosen")}
ALL = PIECES["all of them"]
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
rules_and_pieces = pytest.mark.parametrize(
    ("rule", "options"),
    [
        *(pytest.param(rule, {}, id=name) for name, rule in RULES.items()),
        *(pytest.param(None, options, id=name) for name, options in PIECES.items()),
    ],
)
SIZES = {"vocab_size": VOCAB, "context": CONTEXT, "heads": 4, "kv_heads": 4, "d_expert": 24, "d_feed_forward": 48}


def small(rule: Rule | None, **changes: Any) -> GPTConfig:
    return small_config(rule, **(SIZES | changes))


def tokens_of(batch: int, time: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (batch, time), generator=torch.Generator().manual_seed(seed))


def lively(rule: Rule | None, **changes: Any) -> GPT:
    """Return a model in training mode after a few updates of its rule."""
    return small_model(rule, **(SIZES | changes)).train()


# Size.


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("rule", [None, TokenChoice(8, 2), ExpertThreshold(16)], ids=["dense", "token", "threshold"])
def test_the_closed_form_counts_every_parameter(name: str, activation: Any, rule: Rule | None) -> None:
    sizes: list[dict[str, Any]] = [{}, {"kv_heads": 1}, {"shared_experts": 0, "dense_layers": 2}, {"dense_layers": 0}]
    for changes in [*sizes, *(PIECES.values() if name == "tiny" else ())]:
        config = GPTConfig.preset(name, rule=rule, activation=activation, **changes)
        counts = parameter_counts(config)
        with torch.device("meta"):
            assert counts["total"] == sum(parameter.numel() for parameter in GPT(config).parameters()), changes
        assert counts["total"] == sum(n for part, n in counts.items() if part not in ("total", "active"))
        assert counts["active"] <= counts["total"]


@rules
def test_active_parameters_exclude_the_experts_that_a_token_skips(rule: Rule | None) -> None:
    model = GPT(small(rule))
    expert = 2 * 32 * 24
    idle = 0 if rule is None else 2 * (4 - rule.experts_per_token) * expert
    counts = parameter_counts(model.config)
    assert counts["active"] == sum(p.numel() for p in model.parameters()) - idle
    products = counts["active"] - VOCAB * 32
    config = replace(model.config, context=9)
    assert flops_per_token(config) == 6 * products + 3 * 3 * 4 * 32 * 5  # 5 keys on average


@pytest.mark.parametrize(("dense_layers", "expected"), [(0, [0, 1, 2]), (1, [1, 2]), (3, [])])
def test_the_first_layers_are_dense(dense_layers: int, expected: list[int]) -> None:
    model = GPT(small(TokenChoice(4, 2), dense_layers=dense_layers))
    assert [i for i, _ in model.moe_layers()] == expected
    assert len(model(tokens_of(2, 8)).observations) == len(expected)


# Configuration.


SIZE = (0, -1, 1.0, True, "8", None)
NONSENSE: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("vocab_size", "context", "layers", "d_model", "d_expert", "d_feed_forward"), SIZE),
    "heads": (*SIZE, 5, 32),
    "kv_heads": (*SIZE, 3, 8),
    "dense_layers": (-1, 4, 1.0, True, None),
    "shared_experts": (-1, 1.0, True, None),
    "z_loss": (-1.0, float("inf"), float("nan"), "1", True),
    "rule": ("expert_threshold", ExpertThreshold),
    "activation": ("gelu",), "gate_norm": ("sum",), "dispatch": ("fast",), "initialization": ("he",),
    "value_embeddings": ("none",), "key_offset": ("first",), "qk_scale": (0.0,), "rotary_base": (float("inf"),),
    "windows": ("SXL", ""), "short_window": (4,),
}  # fmt: skip
TOGETHER = {"short_window": {"short_window": 0, "windows": "S"}, "key_offset": {"key_offset": "all", "heads": 16}}


@pytest.mark.parametrize(
    ("option", "options"),
    [(name, {name: value}) for name, values in NONSENSE.items() for value in values] + list(TOGETHER.items()),
    ids=str,
)
@pytest.mark.parametrize("rule", [TokenChoice(4, 2), None], ids=["experts", "dense"])
def test_nonsense_is_refused_with_option_and_value(option: str, options: dict[str, Any], rule: Rule | None) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{option}={options[option]!r} ")) as error:
        small(**({"rule": rule} | options))
    assert "\n" not in str(error.value)


# How it starts.


@rules
def test_a_model_that_left_the_meta_device_equals_one_built_directly(rule: Rule | None) -> None:
    torch.manual_seed(5)
    direct = GPT(small(rule, **ALL))
    with torch.device("meta"):
        model = GPT(small(rule, **ALL))
    assert all(value.is_meta for value in model.state_dict().values())
    model.to_empty(device="cpu")
    for value in model.state_dict().values():
        value.fill_(9)
    torch.manual_seed(5)
    model.init_weights()  # which resets the rules, too
    for (name, found), expected in zip(model.state_dict().items(), direct.state_dict().values(), strict=True):
        assert torch.equal(found, expected), name
        assert found.dtype == expected.dtype


def starts(part: str, d_out: int, d_in: int, initialization: str) -> tuple[float, float]:
    """The standard deviation of a weight, and its largest value over that: √3 if uniform, ∞ if normal."""
    normal, uniform = math.inf, 3**0.5
    if initialization == "paper":  # Appendix C, Eq. 8 and Table 6
        ends = {"embed": 1.0, "router": d_in**-0.5, "head": 0.0, "output": 0.0, "down": 0.0}
        return ends.get(part, d_in**-0.5 * min(1, (d_out / d_in) ** 0.5)), normal
    ends = {"embed": 0.8, "router": d_in**-0.5, "head": 0.001, "output": 0.0, "down": 0.0}
    return (ends[part], normal) if part in ends else ((0.4 if part in ("up", "gate") else 1) * d_in**-0.5, uniform)


@torch.no_grad()
@pytest.mark.parametrize("initialization", ["paper", "nanochat"])
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_every_weight_starts_as_the_papers_table_or_nanochats_code_says(activation: Any, initialization: Any) -> None:
    torch.manual_seed(0)
    sizes = {"layers": 2, "d_model": 96, "heads": 4, "kv_heads": 1, "d_expert": 48, "d_feed_forward": 400}
    model = GPT(GPTConfig(**sizes, vocab_size=999, activation=activation, initialization=initialization))
    for name, weight in model.named_parameters():
        std, largest = starts(name.removesuffix(".weight").rsplit(".", 1)[-1], *weight.shape[-2:], initialization)
        assert float(weight.std(correction=0)) == pytest.approx(std, rel=0.06), name
        assert abs(float(weight.mean())) <= 5 * std / weight.numel() ** 0.5, name
        assert float(weight.abs().max()) <= largest * std * (1 + 1e-6) if std else True, name


# Causality.


def first_difference(model: GPT, position: int) -> int | None:
    """The first position of any sequence whose logits change when all tokens from `position` on do."""
    before = tokens_of(3, CONTEXT)
    after = torch.where(torch.arange(CONTEXT) >= position, (before + 1 + tokens_of(3, CONTEXT, 9) // 2) % VOCAB, before)
    with torch.no_grad():
        first, second = model(before).logits, model(after).logits
    changed = ((first - second).abs().amax((0, 2)) > 1e-4).nonzero()
    return int(changed[0]) if len(changed) else None


@pytest.mark.parametrize(
    "rule", [None, RULES["token_choice"], RULES["loss_free"], ExpertThreshold(4, warmup_steps=0, capacity_slack=None)]
)
def test_without_pools_training_is_causal(rule: Rule | None) -> None:
    assert first_difference(lively(rule), 8) == 8


@pytest.mark.parametrize("name", ["expert_choice", "expert_choice_sequence", "warmup"])
def test_expert_choice_in_training_looks_ahead(name: str) -> None:
    """The negative control: the test above can fail."""
    found = [first_difference(lively(RULES[name]), position) for position in (8, CONTEXT - 1)]
    assert any(first is not None and first < position for first, position in zip(found, (8, CONTEXT - 1), strict=True))


# The cache.


@rules_and_pieces
@pytest.mark.parametrize("kv_heads", [2, 4])
@torch.no_grad()
def test_sequences_of_any_length_share_a_forward(rule: Rule | None, options: dict[str, Any], kv_heads: int) -> None:
    model = lively(rule, kv_heads=kv_heads, **options).eval()
    tokens = tokens_of(4, CONTEXT)
    full = model(tokens, record=True)
    cache = model.new_cache(4, CONTEXT)
    lengths = [0] * 4
    for rows, time in (([2], 5), ([1, 2], 3), ([0, 3], 1), ([0, 1, 2, 3], 1), ([3, 1, 0], 4), ([0, 1, 2, 3], 1)):
        pieces = torch.stack([tokens[row, lengths[row] : lengths[row] + time] for row in rows])
        output = model(pieces, cache=cache.select(rows), record=True)
        for i, row in enumerate(rows):
            place = slice(lengths[row], lengths[row] + time)
            lengths[row] += time
            torch.testing.assert_close(output.logits[i], full.logits[row, place], atol=1e-4, rtol=1e-4)
            for found, expected in zip(output.routings, full.routings, strict=True):
                assert torch.equal(found.assignment[i], expected.assignment[row, place])
        assert cache.lengths == lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_snapshot_computes_the_same_bits_in_evaluation_whatever_the_mode_of_its_model(dtype: torch.dtype) -> None:
    model = lively(RULES["expert_threshold"], **ALL)
    model.compute_dtype = dtype
    expected = model.eval()(tokens_of(2, CONTEXT)).logits
    snapshot = model.train().snapshot()
    assert model.training
    assert not any(module.training for module in snapshot.modules())
    assert torch.equal(snapshot(tokens_of(2, CONTEXT)).logits, expected)
    for table in ("embed.weight", "blocks.2.attention.value_embed.weight"):
        assert snapshot.get_parameter(table).data_ptr() == model.get_parameter(table).data_ptr()
    assert snapshot.head.weight.dtype == dtype
    model.eval().set_rate(0 if dtype == torch.float32 else None)
    assert torch.equal(model.snapshot()(tokens_of(2, CONTEXT)).logits, model(tokens_of(2, CONTEXT)).logits)


@torch.no_grad()
def test_more_tokens_than_context_or_cache_are_refused_and_leave_the_cache_alone() -> None:
    model = GPT(small(TokenChoice(4, 2))).eval()
    with pytest.raises(ValueError, match=f"sequence of {CONTEXT + 1} tokens is longer than the context of {CONTEXT}"):
        model(tokens_of(1, CONTEXT + 1))
    for length, limit in ((5, 5), (99, CONTEXT)):
        cache = model.new_cache(1, length)
        model(tokens_of(1, 4), cache=cache)
        with pytest.raises(ValueError, match=f"is longer than the context of {limit}; shorten it"):
            model(tokens_of(1, limit - 3), cache=cache)
        assert cache.lengths == [4]


@torch.no_grad()
def test_a_cache_requires_one_sequence_per_selected_row_and_inference_without_gradients() -> None:
    model = small_model()
    cache, tokens = model.new_cache(3, 8), torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="batch of 2 sequences does not match the cache's 3 rows"):
        model(tokens, cache=cache)
    for rows in ([0, 0], [0, 3], [-1, 0]):
        with pytest.raises(ValueError, match="must be distinct and between 0 and 2"):
            cache.select(rows)
    with pytest.raises(ValueError, match="cache is for inference"):
        model.train()(tokens, cache=cache.select([0, 2]))
    with torch.enable_grad(), pytest.raises(ValueError, match="no_grad"):  # it would keep the graph of every call
        model.eval()(tokens, cache=cache.select([0, 2]))
    model.eval()(tokens, cache=cache.select([0, 2]))
    assert cache.lengths == [4, 0, 4]


# Losses, observations, gradients.


@rules
def test_the_loss_is_cross_entropy_plus_the_routing_losses_of_all_layers(rule: Rule | None) -> None:
    model = lively(rule, z_loss=0.01)
    tokens, targets = tokens_of(2, CONTEXT), tokens_of(2, CONTEXT, 1)
    targets[0, :5] = -1
    output = model(tokens, targets, record=True)
    logits = model(tokens).logits
    assert output.logits is None
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none").view(2, -1)
    torch.testing.assert_close(output.token_losses, losses.detach(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(output.cross_entropy, losses.sum() / (2 * CONTEXT - 5), atol=1e-5, rtol=1e-5)
    extra = [routing.loss for routing in output.routings]
    assert len(extra) == (0 if rule is None else 2)
    torch.testing.assert_close(output.loss, output.cross_entropy + sum(extra))
    assert rule is None or output.loss > output.cross_entropy
    assert not output.token_losses.requires_grad
    model.eval()
    silent = model(tokens, targets)
    assert torch.equal(silent.loss, silent.cross_entropy)


@rules
def test_activation_checkpointing_changes_no_loss_gradient_or_observation(rule: Rule | None) -> None:
    model = lively(rule, z_loss=0.01, **ALL)
    tokens, targets = tokens_of(2, CONTEXT), tokens_of(2, CONTEXT, 1)
    found = []
    for checkpointing in (False, True):
        model.activation_checkpointing = checkpointing
        model.zero_grad()
        state = [value.clone() for value in model.buffers()]
        output = model(tokens, targets)
        output.loss.backward()
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), state, strict=True))
        found.append((output, [parameter.grad for parameter in model.parameters()]))
    (plain, gradients), (checkpointed, recomputed) = found
    assert torch.equal(checkpointed.loss, plain.loss)
    for a, b in zip(recomputed, gradients, strict=True):
        assert torch.equal(a, b)
    for ours, theirs in zip(checkpointed.observations, plain.observations, strict=True):
        assert same(ours, theirs)


def test_in_bfloat16_weights_gradients_scores_and_losses_stay_float32() -> None:
    torch.manual_seed(0)
    rule = TokenChoice(2, 1)
    model = GPT(small(rule, layers=2, d_model=16, heads=2, kv_heads=1), torch.bfloat16)
    output = model(tokens_of(1, 4), tokens_of(1, 4, 1), record=True)
    output.loss.backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert output.loss.dtype == output.token_losses.dtype == output.routings[0].scores.dtype == torch.float32


@rules
@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_an_empty_batch_has_no_loss_and_zero_gradients(rule: Rule | None, shape: tuple[int, int]) -> None:
    model = lively(rule, z_loss=0.1)
    empty = torch.zeros(shape, dtype=torch.int64)
    output = model(empty, empty)
    assert output.loss == 0
    output.loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert model(empty).logits.shape == (*shape, VOCAB)


def test_every_parameter_gets_a_gradient_once_output_projections_are_nonzero() -> None:
    for rule in RULES.values():
        model = lively(rule, activation="swiglu", **ALL)
        model(tokens_of(4, CONTEXT), tokens_of(4, CONTEXT, 1)).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name


def test_the_model_computes_in_its_own_dtype_inside_of_autocast() -> None:
    model = GPT(GPTConfig.preset("tiny"))
    tokens = torch.randint(0, model.config.vocab_size, (2, 16))
    outside = model(tokens, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        inside = model(tokens, tokens)
    inside.loss.backward()
    torch.testing.assert_close(inside.loss, outside.loss, rtol=0, atol=0)


class Adapter(nn.Module):
    """A linear layer with a low-rank adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_adapters_in_place_of_linear_layers_compute_as_their_merged_weights(activation: Any) -> None:
    """Regression: most adapters were silently ignored, because kernels read the weights directly."""
    adapted = lively(RULES["expert_threshold"], activation=activation, value_embeddings="all", smear=True)
    merged = copy.deepcopy(adapted)
    for module in list(adapted.modules()):
        for name, linear in module.named_children():
            if isinstance(linear, nn.Linear):
                setattr(module, name, Adapter(linear))
    adapters = [module for module in adapted.modules() if isinstance(module, Adapter)]
    originals = [module for module in merged.modules() if isinstance(module, nn.Linear)]
    with torch.no_grad():
        for adapter, linear in zip(adapters, originals, strict=True):
            linear.weight += adapter.up.weight @ adapter.down.weight
    tokens = tokens_of(2, CONTEXT)
    targets = tokens.roll(-1, 1).index_fill(1, torch.tensor([0]), -1)
    found, expected = adapted(tokens, targets), merged(tokens, targets)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.token_losses, expected.token_losses, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, rtol=1e-3, atol=1e-3)
    found.loss.backward()
    assert all(adapter.up.weight.grad is not None for adapter in adapters)


@pytest.mark.parametrize(
    ("register", "how"),
    [
        *(("register_forward_hook", how) for how in ("training", "checkpointed", "evaluation", "cached")),
        ("register_forward_pre_hook", "training"),
        ("register_full_backward_hook", "training"),
    ],
)
def test_hooks_on_every_linear_layer_and_on_layers_of_experts_fire(register: str, how: str) -> None:
    """Regression: blocks bypassed `MoE.forward`, so hooks on the layer never fired."""
    model, tokens = lively(RULES["expert_threshold"]), tokens_of(2, CONTEXT)
    model.activation_checkpointing = how == "checkpointed"
    kinds = nn.Linear if "backward" in register else (nn.Linear, MoE)
    modules = {module for module in model.modules() if isinstance(module, kinds)}
    called: set[nn.Module] = set()
    for module in modules:
        getattr(module, register)(lambda module, *_: called.add(module))
    if how in ("training", "checkpointed"):
        model(tokens, tokens).loss.backward()
    else:
        with torch.no_grad():
            model.eval()(tokens, cache=model.new_cache(2, CONTEXT) if how == "cached" else None)
    assert called == modules


@pytest.mark.usefixtures("fresh_memory_is_nan")
@pytest.mark.parametrize("children_first", [True, False])
def test_made_empty_every_module_can_reset_its_own_parameters(children_first: bool) -> None:
    model = lively(RULES["expert_threshold"], residual_scalars=True, skip_scalars=True, smear=True, backout=True)
    model.to_empty(device="cpu")
    modules = list(model.modules())
    for module in reversed(modules) if children_first else modules:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(value.isfinite().all() for value in model.state_dict().values())

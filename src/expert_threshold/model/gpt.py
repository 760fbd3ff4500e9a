"""A GPT with nanochat's architecture and Mixture-of-Experts feed-forwards (paper, Appendix B)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..kernels import no_autocast
from ..moe import (
    ActivationName,
    DispatchName,
    FeedForward,
    FollowerHook,
    GateNorm,
    Linear,
    MoE,
    hooked,
    plain,
    require_rule,
)
from ..option import Bounds, Count, NonNegative, NonNegativeInt, option, require_valid
from ..routing import ExpertThreshold, Observation, Routing, Rule, rule_from_dict, rule_to_dict
from .attention import Attention, Cache, CacheSlice, norm, rotary
from .cross_entropy import cross_entropy, linear_cross_entropy, softcap_logits
from .presets import PRESETS, SMEAR_GATE_CHANNELS

Initialization = Literal["paper", "nanochat"]
ValueEmbeddings = Literal["alternate", "all"]
KeyOffset = Literal["last", "all"]


@dataclass(frozen=True)
class GPTConfig:
    """The options of a model. With rule=None, it is dense: every layer has a feed-forward of width d_feed_forward.

    Raises ValueError if an option is invalid or if options contradict each other.
    """

    vocab_size: Count = option(65536, "Vocabulary size in tokens.")
    context: Count = option(2048, "Sequence length in tokens.")
    layers: Annotated[int, Bounds(least=1, most=1_000)] = option(12, "Number of Transformer layers.")
    d_model: Count = option(768, "Width of the model. Other widths of a preset scale with it unless they are set.")
    heads: Count = option(6, "Number of attention heads.")
    kv_heads: Count = option(6, "Number of key-value heads. Fewer than heads means grouped-query attention.")
    d_expert: Count = option(1536, "Hidden width of an expert.")
    d_feed_forward: Count = option(3072, "Hidden width of the feed-forward network in dense layers.")
    shared_experts: NonNegativeInt = option(1, "Number of experts that process every token.")
    dense_layers: NonNegativeInt = option(1, "Number of leading layers without experts.")
    softcap: ClassVar[float] = 15.0  # bounds logits to ± this value, in the paper, nanochat and the release
    # The rule that turns scores into an assignment; None for a dense model.
    rule: Rule | None = ExpertThreshold()  # noqa: RUF009  a frozen record
    gate_norm: GateNorm | None = option(None, "Divide the routed sum by the fanout. none disables this.")
    activation: ActivationName = option("relu2", "Activation of the feed-forward networks.")
    z_loss: NonNegative | None = option(None, "Strength of the router z-loss. none disables it.")
    initialization: Initialization = option("paper", "Distribution of the initial weights. Only affects new models.")
    value_embeddings: ValueEmbeddings | None = option(
        None,
        "Layers that add a learned, gated embedding of each token to its attention value. alternate selects every "
        "other layer, including the last. Omit for none.",
    )
    residual_scalars: bool = option(False, "Multiply the residual stream by a learned number before each layer.")
    skip_scalars: bool = option(False, "Add the first layer's input, times a learned number, to each layer's input.")
    smear: bool = option(False, "Add a gated part of the previous token's embedding to each token's embedding.")
    backout: bool = option(False, "Subtract the middle layer's output, times a learned number, before the head.")
    qk_scale: Annotated[float, Bounds(above=0, most=100)] = option(
        1.0, "Factor applied to queries and keys after normalization. Values above 1 sharpen attention."
    )
    rotary_base: Annotated[float, Bounds(above=1, most=10**12)] = option(1e4, "Base of the rotary embeddings.")
    key_offset: KeyOffset | None = option(
        None,
        "Layers in which the slowest-rotating half of each key comes from the previous token, so that a single layer "
        "can find what followed a token. Omit for none.",
    )
    windows: str | None = option(
        None,
        "Sliding-window pattern, such as SSSL, which is repeated over the layers. L layers attend to all tokens, S "
        "layers to a window. The last layer is always L. Defaults to L for all layers.",
    )
    short_window: Count | None = option(
        None,
        "Number of earlier tokens that a token attends to in an S layer. Defaults to a quarter of the context, rounded "
        "up to a multiple of 128.",
    )
    dispatch: DispatchName = option(
        "auto",
        "Backend that computes the experts. In training on a GPU, auto chooses the fastest by measurement; "
        "otherwise, it chooses cpu if the processor has kernels, or else grouped.",
    )

    def __post_init__(self) -> None:
        require_valid(GPTConfig, vars(self))
        if self.d_model % self.heads or (self.d_model // self.heads) % 2:
            raise ValueError(f"heads={self.heads} must divide d_model={self.d_model} into heads of even width")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.key_offset is not None and self.d_model // self.heads < 4:
            raise ValueError(
                f"key_offset={self.key_offset!r} requires heads of width 4 or more, but heads={self.heads} gives 2"
            )
        if self.dense_layers > self.layers:
            raise ValueError(f"dense_layers={self.dense_layers} must be at most layers={self.layers}")
        if self.windows is not None and not set(self.windows) <= set("SL"):
            raise ValueError(f"windows={self.windows!r} must be a pattern of S and L, such as SSSL, or None for all L")
        if self.short_window is not None and "S" not in (self.windows or ""):
            raise ValueError(f"short_window={self.short_window} requires S layers; set windows, such as SSSL")
        if self.rule is not None:
            require_rule(self.rule)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> GPTConfig:
        """Return the preset called `name`, with the given changes. Raises ValueError if there is no such preset."""
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; use one of {', '.join(PRESETS)}")
        return cls(**(PRESETS[name] | changes))

    def has_value_embedding(self, layer: int) -> bool:
        """Return True if the layer has value embeddings."""
        alternates = self.value_embeddings == "alternate" and layer % 2 == (self.layers - 1) % 2
        return alternates or self.value_embeddings == "all"

    def has_key_offset(self, layer: int) -> bool:
        """Return True if half of each key in the layer comes from the previous token."""
        return self.key_offset == "all" or (self.key_offset == "last" and layer == self.layers - 1)

    def window(self, layer: int) -> int | None:
        """Return the number of earlier tokens that a token attends to in the layer, or None for all."""
        if self.windows is None or layer == self.layers - 1 or self.windows[layer % len(self.windows)] == "L":
            return None
        return 128 * math.ceil(self.context / 512) if self.short_window is None else self.short_window

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as the sections `model` and `rule` of a config.json."""
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "rule"}
        return {"model": options, "rule": rule_to_dict(self.rule)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> GPTConfig:
        """Create a configuration from the result of `to_dict` or from a whole config.json.

        Raises ValueError if a section is missing or an option is unknown.
        """
        for section in ("model", "rule"):
            if not isinstance(record.get(section), Mapping):
                raise ValueError(f"section {section!r} is missing or damaged; restore the file from a backup")
        options = record["model"]
        require_valid(cls, options)
        if "rule" in options:
            raise ValueError("unknown option 'rule'; put the rule in the section 'rule'")
        return cls(**options, rule=rule_from_dict(record["rule"]))


class Output(NamedTuple):
    """The results of a forward pass. With targets, logits is None; without targets, the losses are None.

    logits: (batch, time, vocab) float32; loss: the scalar to call backward on, including routing losses; cross_entropy:
    the main part of the loss, in nats per token; token_losses: (batch, time) float32 without gradient, 0 where the
    target is -1. observations and routings have one entry per MoE layer; routings is None unless recorded.
    """

    logits: Tensor | None
    loss: Tensor | None
    cross_entropy: Tensor | None
    token_losses: Tensor | None
    observations: tuple[Observation, ...]
    routings: tuple[Routing, ...] | None


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)), where the feed-forward is dense or has experts."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        vocab_size = config.vocab_size if config.has_value_embedding(layer) else None
        sizes, window = (config.d_model, config.heads, config.kv_heads), config.window(layer)
        self.attention = Attention(*sizes, window, vocab_size, key_offset=config.has_key_offset(layer))
        self.feed_forward: FeedForward | None = None
        self.moe: MoE | None = None
        if config.rule is None or layer < config.dense_layers:
            self.feed_forward = FeedForward(config.d_model, config.d_feed_forward, config.activation)
        else:
            self.moe = MoE(
                config.d_model,
                config.d_expert,
                config.rule,
                config.shared_experts,
                config.dispatch,
                activation=config.activation,
                gate_norm=config.gate_norm,
                z_loss=config.z_loss,
            )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, span: CacheSlice | None, tokens: Tensor
    ) -> tuple[Tensor, Routing | None]:
        x = x + self.attention(norm(x), cos, sin, span, self.layer, tokens)
        if self.moe is None:
            assert self.feed_forward is not None
            return x + self.feed_forward(norm(x)), None
        y, routing = self.moe(norm(x), None if span is None else span.cache.pasts(self.layer), record=True)
        if span is not None and self.moe.router.rule.scope(training=False) != "token":
            span.cache.append_scores(self.layer, routing.scores)
        return x + y, routing


# Standard deviations of normal weights. For other parts, they depend on the shape of the weight.
_NORMAL: dict[Initialization, dict[str, float]] = {
    "paper": {"embed": 1.0, "head": 0.0, "output": 0.0, "down": 0.0},
    "nanochat": {"embed": 0.8, "head": 0.001, "output": 0.0, "down": 0.0},
}


def _draw(part: str, weight: Tensor, initialization: Initialization) -> None:
    """Draw a weight as in the paper (Appendix C, Eq. 8 and Table 6) or as in nanochat at 92d63d4 (July 2026).

    Weights that only nanochat's trunk has are always drawn as there, and routers always as in the paper. nanochat's
    uniform weights have a standard deviation of d_in^(−1/2), or 0.4 times as much at the input of a feed-forward.
    """
    d_in = weight.shape[-1]
    if part in ("residual_scalars", "skip_scalars"):
        ends = (1.15, 1.05) if part == "residual_scalars" else (0.20, 0.05)
        weight.copy_(torch.linspace(*ends, len(weight), device=weight.device))
    elif part in ("smear_scalar", "backout_scalar"):
        weight.fill_(0.2 if part == "backout_scalar" else 0)
    elif part in ("value_gate", "smear_gate"):
        weight.uniform_(0, 0.02)
    elif (std := _NORMAL[initialization].get(part)) is not None:
        weight.normal_(0, std) if std else weight.zero_()
    elif part == "router":
        weight.normal_(0, d_in**-0.5)
    elif part == "value_embed" or initialization == "nanochat":
        bound = (0.4 if part in ("up", "gate") else 1) * (3 / d_in) ** 0.5
        weight.uniform_(-bound, bound)
    else:
        weight.normal_(0, d_in**-0.5 * min(1, (weight.shape[-2] / d_in) ** 0.5))


def _learned(count: int, there: bool) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(count)) if there else None


class GPT(nn.Module):
    """A GPT with rotary positions, RMSNorm without parameters, QK norm, untied embeddings and softcapped logits.

    With all options of the trunk enabled, layer i computes x ← block_i(λ_i x + μ_i s), where s is the smeared
    embedding, and the head reads norm(x − β x_mid), where x_mid is the middle layer's output.

    Master weights are float32; products run in compute_dtype. Random numbers come from torch's global generator.
    """

    def __init__(self, config: GPTConfig, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.activation_checkpointing = False
        device = torch.get_default_device()
        with torch.device("meta"):  # weights are drawn once, below
            self.embed = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.d_model), freeze=False)
            self.blocks = nn.ModuleList([Block(config, layer) for layer in range(config.layers)])
            self.head = Linear(config.d_model, config.vocab_size)
            self.residual_scalars = _learned(config.layers, config.residual_scalars)
            self.skip_scalars = _learned(config.layers, config.skip_scalars)
            self.backout_scalar = _learned(1, config.backout)
            self.smear_scalar = _learned(1, config.smear)
            self.smear_gate = Linear(min(SMEAR_GATE_CHANNELS, config.d_model), 1) if config.smear else None
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Apply the configured initialisation and reset the states of the rules."""
        for name, weight in self.named_parameters():
            part = name.removesuffix(".weight").rsplit(".", 1)[-1]
            _draw(part, weight, self.config.initialization)
        for _, moe in self.moe_layers():
            moe.router.reset_state()

    reset_parameters = init_weights  # the name in loops over `modules()`

    def moe_layers(self) -> list[tuple[int, MoE]]:
        """Return the layers with experts, each with its index among the blocks."""
        return [(i, block.moe) for i, block in enumerate(self.blocks) if block.moe is not None]  # type: ignore[misc]

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        cache: Cache | None = None,
        record: bool = False,
        last: bool = False,
    ) -> Output:
        """Return the output for tokens and targets, both (batch, time) int64. Targets of -1 are ignored.

        With a cache, which is for inference only, each row of tokens is appended to the sequence in its row of the
        cache. last: compute logits for the last token only. Products run in the compute dtype of the model, even under
        autocast. Raises ValueError if a sequence exceeds the context.
        """
        with no_autocast(tokens):
            return self._forward(tokens, targets, cache, record, last)

    def _forward(self, tokens: Tensor, targets: Tensor | None, cache: Cache | None, record: bool, last: bool) -> Output:
        time, limit = tokens.shape[1], self.config.context
        span: CacheSlice | None = None
        if cache is not None:
            if torch.is_grad_enabled():
                raise ValueError("the cache stores no gradients; call the model under torch.no_grad() or without it")
            if self.training:
                raise ValueError("the cache is for inference, but the model is in training mode; call model.eval()")
            if len(tokens) != len(cache.rows):
                raise ValueError(f"batch of {len(tokens)} sequences does not match the cache's {len(cache.rows)} rows")
            span, limit = CacheSlice(cache, time), min(limit, cache.capacity)
        end = time if span is None else span.end
        if end > limit:
            raise ValueError(f"a sequence of {end} tokens is longer than the context of {limit}; shorten it")
        positions = torch.arange(time, device=tokens.device) if span is None else span.positions[:, None]
        cos, sin = (t.to(self.compute_dtype) for t in self.rotary(positions.float()))

        embedded = norm(self.embed(tokens).to(self.compute_dtype))
        x = start = self._smeared(embedded, span)
        middle: Tensor | None = None
        routings: list[Routing] = []
        for layer, block in enumerate(self.blocks):
            x = self._mixed(x, start, layer)
            if self.activation_checkpointing and torch.is_grad_enabled():
                x, routing = checkpoint(block, x, cos, sin, span, tokens, use_reentrant=False)
            else:
                x, routing = block(x, cos, sin, span, tokens)
            if routing is not None:
                routings.append(routing)
            if layer == self.config.layers // 2:
                middle = x
        if self.backout_scalar is not None:
            assert middle is not None
            x = x - self.backout_scalar.to(x.dtype) * middle
        x = norm(x)
        if span is not None:
            span.cache.advance(time)
            if self.smear_gate is not None:
                span.keep_last(embedded)

        observations = tuple(routing.observation for routing in routings)
        recorded = tuple(routings) if record else None
        if targets is None:
            logits = softcap_logits(self.head(x[:, -1:] if last else x), self.config.softcap)
            return Output(logits, None, None, None, observations, recorded)
        flat, wanted, softcap = x.flatten(0, 1), targets.flatten(), self.config.softcap
        if plain(self.head):
            mean, token_losses = linear_cross_entropy(flat, self.head.weight, wanted, softcap)
        else:
            mean, token_losses = cross_entropy(softcap_logits(self.head(flat), softcap), wanted)
        loss = sum((routing.loss for routing in routings if routing.loss is not None), mean)
        return Output(None, loss, mean, token_losses.view(targets.shape), observations, recorded)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (…, time, head_dim / 2) float32 for positions (…, time), multiplied by qk_scale."""
        head_dim = self.config.d_model // self.config.heads
        return rotary(positions, head_dim, self.config.rotary_base, self.config.qk_scale)

    def _smeared(self, x: Tensor, span: CacheSlice | None) -> Tensor:
        """Return x_t + λ σ(gate(x_t)) x_{t−1} if the model has smear, otherwise x. x: (batch, time, d_model)."""
        if self.smear_gate is None:
            return x
        assert self.smear_scalar is not None
        last = x.new_zeros(len(x), x.shape[2]) if span is None else span.last()
        before = torch.cat((last[:, None], x), 1)[:, :-1]
        gates = self.smear_scalar.to(x.dtype) * self.smear_gate(x[..., :SMEAR_GATE_CHANNELS]).sigmoid()
        y: Tensor = x + gates * before
        return y

    def _mixed(self, x: Tensor, start: Tensor, layer: int) -> Tensor:
        """Return λ x + μ start for the layer, without the scalars that the model lacks."""
        if self.residual_scalars is not None:
            x = self.residual_scalars[layer].to(x.dtype) * x
        if self.skip_scalars is not None:
            x = x + self.skip_scalars[layer].to(x.dtype) * start
        return x

    def set_rate(self, rate: float | None) -> None:
        """Set the mean fanout at inference to `rate` in every MoE layer. None restores the trained rate.

        Raises the same errors as `check_rate`.
        """
        self.check_rate(rate)
        for _, moe in self.moe_layers():
            moe.router.rate = rate

    def check_rate(self, rate: float | None) -> None:
        """Raise ValueError if the rate is not between 0 and num_experts, or if the model has no cutoffs or sketches."""
        if rate is not None and not self.moe_layers():
            raise ValueError(f"rate={rate} requires experts, but this model is dense; use a model with a routing rule")
        for _, moe in self.moe_layers():
            moe.router.at_rate(rate)

    def update_rules(self, observations: tuple[Observation, ...]) -> None:
        """Update the rule of every layer, once per optimizer step, from sums over micro-batches and ranks."""
        for (_, moe), observation in zip(self.moe_layers(), observations, strict=True):
            moe.router.update(observation)

    @property
    def adapted(self) -> bool:
        """Whether adapters or hooks change what the model computes from its weights."""
        ours = __name__.partition(".")[0]
        return any(
            hooked(module, except_by=FollowerHook)
            or not (type(module) in (nn.ModuleList, nn.Embedding) or type(module).__module__.startswith(f"{ours}."))
            for module in self.modules()
        )

    def snapshot(self) -> GPT:
        """Return a copy for inference with matrices in the compute dtype, valid until this model's weights change.

        Matrices that need no cast are shared with this model, so that a server stores them only once. The projections
        of queries, keys and values are copied, so the copy would mix old and new weights after a training step.
        Embeddings and routers keep their dtype, since a forward only casts the rows that it looks up. An `adapted`
        model is copied as is.
        """
        if self.adapted:
            return copy.deepcopy(self).eval().requires_grad_(False)
        with torch.device("meta"):
            other = GPT(self.config, self.compute_dtype)
        weights = self.state_dict()
        for name, weight in weights.items():
            if not name.endswith("embed.weight") and ".router." not in name:
                weights[name] = weight.to(self.compute_dtype)
        other.load_state_dict(weights, assign=True)
        for block in other.blocks:
            assert isinstance(block, Block)
            block.attention.joined(keep=True)
        for (_, its), (_, own) in zip(other.moe_layers(), self.moe_layers(), strict=True):
            its.router.rate = own.router.rate
        return other.eval().requires_grad_(False)

    def new_cache(self, batch: int, length: int) -> Cache:
        """Return an empty cache for `batch` sequences of up to `length` tokens each."""
        config, device = self.config, self.embed.weight.device
        shape = config.layers, batch, length + 1, 2, config.kv_heads, config.d_model // config.heads
        held = torch.zeros(shape, dtype=self.compute_dtype, device=device)
        return Cache(held, held.new_zeros(batch, config.d_model if config.smear else 0))

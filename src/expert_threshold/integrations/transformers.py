"""The trained model for Hugging Face transformers.

Importing this file registers the type `expert_threshold` with transformers' Auto classes. The file imports only torch,
transformers and the routing rule: `et export` copies it and the rule next to the weights, so that the folder loads
without the package (`trust_remote_code=True`).

A token is routed by its own scores alone, so padding and other texts in the batch do not affect it. Cutoffs do not
change, even in fine-tuning, unless `expert_threshold.integrations.follow` updates them together with the weights.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(f"{error}; run: pip install 'transformers>=5.16' 'accelerate>=1.1'") from None
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

RULE_FILE = "exported_rule"


def make_rule(options: dict[str, Any]) -> Any:
    """Return the rule with these options. Its class is in the exported file if there is one, else in our package."""
    try:
        from .exported_rule import RULE  # type: ignore[import-not-found]
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.endswith(RULE_FILE):
            raise
        from expert_threshold.routing import rule_from_dict

        return rule_from_dict(options)
    return RULE(**{name: value for name, value in options.items() if name != "name"})


class ExpertThresholdConfig(PreTrainedConfig):
    """The model's options, named as in expert_threshold. `rule` contains all options of the routing rule.

    run: facts about the training run for `et import`, which do not affect the model.

    No field may have a name such as num_experts or num_local_experts, since vLLM would then replace `experts` with its
    own, which use SiLU.
    """

    model_type = "expert_threshold"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "intermediate_size": "d_feed_forward",
        "max_position_embeddings": "context",
        "num_attention_heads": "heads",
        "num_hidden_layers": "layers",
        "num_key_value_heads": "kv_heads",
        "softcap": "final_logit_softcapping",
    }
    base_model_tp_plan = {  # noqa: RUF012
        f"blocks.*.{linear}": "rowwise" if linear.endswith(("output", "down")) else "colwise"
        for part, linears in {
            "attention": ("query", "key", "value", "output"),
            "feed_forward": ("up", "gate", "down"),
            "moe.shared": ("up", "gate", "down"),
        }.items()
        for linear in (f"{part}.{name}" for name in linears)
    }

    vocab_size: int = 65536
    context: int = 2048
    layers: int = 12
    d_model: int = 768
    heads: int = 6
    kv_heads: int = 6
    d_expert: int = 1536
    d_feed_forward: int = 3072
    shared_experts: int = 1
    dense_layers: int = 1
    rule: dict[str, Any] | None = None
    final_logit_softcapping: float = 15.0
    gate_norm: str | None = None
    activation: str = "relu2"
    z_loss: float | None = None
    initialization: str = "paper"
    value_embeddings: str | None = None
    residual_scalars: bool = False
    skip_scalars: bool = False
    smear: bool = False
    backout: bool = False
    qk_scale: float = 1.0
    rotary_base: float = 10_000.0
    key_offset: str | None = None
    windows: str | None = None
    short_window: int | None = None
    dispatch: str = "auto"
    use_cache: bool = True
    tie_word_embeddings: bool = False
    run: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.rule is None:
            self.rule = {"name": "dense"}
        if self.value_embeddings is not None:  # these are added to the values of all heads
            plan = type(self).base_model_tp_plan
            self.base_model_tp_plan = {name: style for name, style in plan.items() if "attention" not in name}  # type: ignore[misc]
        super().__post_init__(**kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save the configuration and the model's code, so that `PreTrainedModel.save_pretrained` pushes both."""
        assert self.rule is not None
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        for name, text in _sources(self.rule).items():
            (Path(save_directory) / name).write_text(text, encoding="utf-8")
        super().save_pretrained(save_directory, *args, **kwargs)

    def has_value_embedding(self, layer: int) -> bool:
        """Return whether the layer has a table of value embeddings."""
        alternates = self.value_embeddings == "alternate" and layer % 2 == (self.layers - 1) % 2
        return alternates or self.value_embeddings == "all"

    def has_key_offset(self, layer: int) -> bool:
        """Return whether half of every key in the layer comes from the previous token."""
        return self.key_offset == "all" or (self.key_offset == "last" and layer == self.layers - 1)

    def window(self, layer: int) -> int | None:
        """Return how many previous tokens a token sees in the layer, or None if it sees all."""
        if self.windows is None or layer == self.layers - 1 or self.windows[layer % len(self.windows)] == "L":
            return None
        return 128 * -(-self.context // 512) if self.short_window is None else self.short_window

    @property
    def layer_types(self) -> list[str]:
        """The cache type of each layer: full or sliding attention, and hybrid where smear's state is kept."""
        kinds = ["full_attention" if self.window(i) is None else "sliding_attention" for i in range(self.layers)]
        if self.smear:
            kinds[0] = "hybrid" if self.window(0) is None else "hybrid_sliding"
        return kinds

    @property
    def sliding_window(self) -> int | None:
        """How many keys a short layer caches: its window, the token itself, and one more with key offset."""
        windows = [window for window in map(self.window, range(self.layers)) if window is not None]
        return windows[0] + 1 + (self.key_offset == "all") if windows else None


def norm(x: Tensor) -> Tensor:
    """Apply RMSNorm without parameters over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],))


def within(window: int) -> Callable[[int, int, int, int], bool]:
    """Return a mask function of (batch, head, query, key) that allows keys up to `window` before the query."""
    return lambda batch, head, query, key: key >= query - window


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (batch, heads, time, head_dim), its two halves paired, by the positions' angles (RoPE)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)


def delay(keys: Tensor, continues: Tensor | None) -> Tensor:
    """Return rotated keys (batch, heads, time, head_dim), their slowest-rotating half taken from the previous token.
    That half is zero for the first token and where `continues` (batch, time) is False.
    """
    pairs = keys.shape[-1] // 2
    slow = torch.arange(2 * pairs, device=keys.device) % pairs >= pairs - pairs // 2
    previous = F.pad(keys[:, :, :-1], (0, 0, 1, 0))
    if continues is not None:
        previous = previous * continues[:, None, :, None].to(keys)
    return torch.where(slow, previous, keys)


def starting(module: Any, start: str) -> Any:
    """Mark the module so that `_init_weights` initializes it in the way named by `start`, and return it."""
    module.start = start
    return module


class Attention(nn.Module):
    """Causal self-attention with rotary positions and QK norm."""

    def __init__(self, config: ExpertThresholdConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer
        self.is_causal = True
        self.num_key_value_groups = config.heads // config.kv_heads
        self.head_dim = config.d_model // config.heads
        self.scaling = config.qk_scale**2 * self.head_dim**-0.5
        window = config.window(layer)
        self.sliding_window = None if window is None else window + 1
        self.query = nn.Linear(config.d_model, config.heads * self.head_dim, bias=False)
        self.key = nn.Linear(config.d_model, config.kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(config.d_model, config.kv_heads * self.head_dim, bias=False)
        self.output = starting(nn.Linear(config.heads * self.head_dim, config.d_model, bias=False), "zero")
        self.gate_channels = min(12, config.d_model)
        self.value_embed: nn.Embedding | None = None
        if config.has_value_embedding(layer):
            self.value_embed = starting(nn.Embedding(config.vocab_size, config.kv_heads * self.head_dim), "value")
            self.value_gate = starting(nn.Linear(self.gate_channels, config.kv_heads, bias=False), "gate")

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, tokens: Tensor | None, seen: Tensor | None,
        continues: Tensor | None, past_key_values: Cache | None, **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return the output, and the attention weights if computed. x: (batch, time, d_model); cos, sin:
        (batch, 1, time, head_dim / 2); tokens, seen, continues: (batch, time), or None.
        """
        projected = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.query, self.key, self.value))
        q, k, v = (each.transpose(1, 2) for each in projected)
        if self.value_embed is not None:
            if tokens is None:
                raise ValueError("value embeddings need the tokens; pass input_ids, not inputs_embeds")
            gates = 3 * self.value_gate(x[..., : self.gate_channels]).sigmoid().transpose(1, 2)[..., None]
            v = v + gates * self.value_embed(tokens).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k = (norm(rotate(each, cos, sin)).to(v.dtype) for each in (q, k))  # under autocast, norm returns float32
        offset = self.config.has_key_offset(self.layer_idx)
        if offset and seen is not None:
            k = k * seen[:, None, :, None].to(k)  # padding is masked, but half its key would enter the next token's
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        if offset:
            k = delay(k, continues)  # after caching, so that the cache holds every previous token's key
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        y, weights = attend(self, q, k, v, mask, scaling=self.scaling, sliding_window=self.sliding_window, **kwargs)
        return self.output(y.reshape(*x.shape[:-1], -1)), weights


class FeedForward(nn.Module):
    """down · relu(up · x)², or down · (silu(gate · x) · (up · x))."""

    def __init__(self, d_model: int, d_hidden: int, activation: str) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_hidden, bias=False)
        self.gate = nn.Linear(d_model, d_hidden, bias=False) if activation == "swiglu" else None
        self.down = starting(nn.Linear(d_hidden, d_model, bias=False), "zero")

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y: Tensor = self.down(h.relu().square() if self.gate is None else F.silu(self.gate(x)) * h)
        return y


class Router(nn.Module):
    """Computes scores in float32 and routes tokens by the rule as at inference.

    The dtypes of weight and state are fixed: transformers keeps them when it loads the model in another dtype, and the
    state keeps them under any cast. The state is saved with the weights and is never updated here.
    """

    def __init__(self, config: ExpertThresholdConfig) -> None:
        super().__init__()
        assert config.rule is not None
        self.rule = make_rule(config.rule)
        self.gate_norm = config.gate_norm
        self.weight = nn.Parameter(torch.empty(self.rule.num_scores, config.d_model, dtype=torch.float32))
        for name, value in self.first_state().items():
            self.register_buffer(name, value)

    def first_state(self) -> dict[str, Tensor]:
        """Return the rule's state before training, as buffers."""
        first = self.rule.init()._asdict()
        return {f"state_{name}": v.float() if v.is_floating_point() else v for name, v in first.items()}

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return scores (tokens, num_scores), and weights and ids of experts (tokens, K), for x (batch, time, d_model).

        Rules with copy slots return a fourth tensor, (batch, time), the factor applied to x itself.
        """
        with torch.autocast(x.device.type, enabled=False):  # autocast would round the scores
            scores = F.linear(x.float(), self.weight.float())
        first = self.rule.init()
        state = type(first)(*(getattr(self, f"state_{name}") for name in first._fields))
        return chosen(self.rule, self.rule.route(scores, state, training=False), self.gate_norm)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if new.dtype != old.dtype:
                setattr(self, name, old.to(new.device))
        return self


def chosen(rule: Any, routing: Any, gate_norm: str | None) -> tuple[Tensor, ...]:
    """Convert a routing to what `Router.forward` returns. K is the largest fanout of any token, or a bound in a traced
    graph. A token with fewer experts is padded with others of weight 0, each at most once.
    """
    gates, assignment = (part[..., : rule.num_experts].flatten(0, 1) for part in (routing.gates, routing.assignment))
    if gate_norm == "fanout":
        gates = gates / assignment.sum(-1, keepdim=True).clamp(min=1)
    most = rule.max_pairs(1, training=False)
    if most is None:
        counted = not torch.compiler.is_compiling() and len(assignment) > 0
        most = max(int(assignment.sum(-1).max()), 1) if counted else rule.num_experts
    ids = assignment.int().sort(dim=-1, descending=True, stable=True).indices[:, :most]
    weights = torch.where(assignment, gates, 0).gather(-1, ids)
    copied = () if routing.passthrough is None else (routing.passthrough,)
    return routing.scores.flatten(0, 1), weights, ids, *copied


@use_experts_implementation(has_gate=False)
class StackedExperts(nn.Module):
    """The stacked weights of all routed experts, under the names that transformers' experts implementations read."""

    config: ExpertThresholdConfig  # this and the next two are set by the decorator
    has_gate: bool
    _apply_gate: Callable[[Tensor], Tensor]

    def __init__(self, config: ExpertThresholdConfig) -> None:
        super().__init__()
        assert config.rule is not None
        self.num_experts = config.rule["num_experts"]
        self.act_fn = ACT2FN["silu" if config.activation == "swiglu" else "relu2"]
        up = torch.empty(self.num_experts, config.d_expert, config.d_model)
        if config.activation == "swiglu":
            self.gate_up_proj = nn.Parameter(torch.cat((up, up), 1))
        else:
            self.up_proj = nn.Parameter(up)
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, config.d_model, config.d_expert))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return Σ_k weights[t,k] · expert_ids[t,k](x_t); x: (tokens, d_model), ids and weights: (tokens, K)."""
        y = torch.zeros_like(x)
        for expert in ids[weights != 0].unique().tolist():
            rows, slots = ((ids == expert) & (weights != 0)).nonzero(as_tuple=True)
            h = F.linear(x[rows], (self.gate_up_proj if self.has_gate else self.up_proj)[expert])
            a = self._apply_gate(h) if self.has_gate else self.act_fn(h)
            y = y.index_add(0, rows, F.linear(a, self.down_proj[expert]) * weights[rows, slots, None].to(x.dtype))
        return y


class Experts(StackedExperts):
    """Passes only the token–expert pairs with nonzero weight to an implementation, each as a token with one expert.

    Experts that a token does not use are thus not computed. A traced graph cannot have a data-dependent number of
    pairs, so all K are passed there.
    """

    def __init__(self, config: ExpertThresholdConfig) -> None:
        super().__init__(config)
        self.has_gate = config.activation == "swiglu"

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or self.config._experts_implementation not in ("grouped_mm", "batched_mm"):
            return super().forward(x, ids, weights)
        rows, slots = weights.nonzero(as_tuple=True)
        if not len(rows):
            return torch.zeros_like(x)
        y = super().forward(x[rows], ids[rows, slots, None], weights[rows, slots, None])
        return torch.zeros_like(x).index_add(0, rows, y)


class MoE(nn.Module):
    """y_t = shared(x_t) + Σ_i z[t,i] · g[t,i] · expert_i(x_t), with gates g from the rule."""

    def __init__(self, config: ExpertThresholdConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        width = config.shared_experts * config.d_expert
        self.shared = FeedForward(config.d_model, width, config.activation) if width else None

    def forward(self, x: Tensor) -> Tensor:
        routed = self.router(x)
        if hasattr(routed, "assignment"):  # from the package's router, if `follow` has put it here
            routed = chosen(self.router.rule, routed, self.experts.config.gate_norm)
        _, weights, ids, *copied = routed
        y: Tensor = self.experts(x.flatten(0, 1), ids, weights).view_as(x)
        for factor in copied:
            y = y + factor[..., None].to(x.dtype) * x
        return y if self.shared is None else y + self.shared(x)


class Block(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + feed-forward(norm(x)), where the feed-forward is dense or has experts."""

    def __init__(self, config: ExpertThresholdConfig, layer: int) -> None:
        super().__init__()
        assert config.rule is not None
        dense = config.rule["name"] == "dense" or layer < config.dense_layers
        self.attention = Attention(config, layer)
        self.feed_forward = FeedForward(config.d_model, config.d_feed_forward, config.activation) if dense else None
        self.moe = None if dense else MoE(config)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = x + self.attention(norm(x), *args, **kwargs)[0]
        feed_forward = self.moe if self.feed_forward is None else self.feed_forward
        assert feed_forward is not None
        y: Tensor = x + feed_forward(norm(x))
        return y


def _sources(rule: dict[str, Any]) -> dict[str, str]:
    """Return the contents of this file and of the rule's files, keyed by name in an exported folder."""
    here = Path(__file__)
    if (here.parent / f"{RULE_FILE}.py").is_file() or __package__ != "expert_threshold.integrations":
        files = (path for path in here.parent.glob("*.py") if path.name != "__init__.py")
        return {path.name: path.read_text(encoding="utf-8") for path in files}
    # transformers refuses to load a file with an import statement for a missing package.
    rule_source = importlib.import_module("expert_threshold.integrations.rule_source")
    made = None if rule["name"] == "dense" else make_rule(rule)
    return {"modeling_expert_threshold.py": here.read_text(encoding="utf-8"), **rule_source.rule_files(made)}


STARTS = {
    "residual_scalars": (1.15, 1.05),
    "skip_scalars": (0.20, 0.05),
    "backout_scalar": (0.2, 0.2),
    "smear_scalar": (0.0, 0.0),
}
"""The initial values of these parameters, which run linearly from the first number to the second."""


class ExpertThresholdPreTrainedModel(PreTrainedModel):
    """The base class of the models below."""

    config_class = ExpertThresholdConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embed"
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["router.weight"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": Block,
        "attentions": Attention,
        "router_logits": OutputRecorder(Router, index=0),
    }

    @staticmethod
    def create_masks_for_generate(
        config: Any, inputs_embeds: Tensor, attention_mask: Tensor | None, past_key_values: Cache | None,
        position_ids: Tensor | None = None, **_: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the attention masks of long and short layers, and `seen` (batch, time), 0 for padding, or None.

        Raises ValueError if layers have windows and the attention_mask is not two-dimensional.
        """
        windows = [config.window(layer) for layer in range(config.layers)]
        if attention_mask is not None and attention_mask.ndim != 2 and set(windows) != {None}:
            raise ValueError("sliding windows need an attention_mask of shape (batch, time); pass one of this shape")
        masks = {
            "long" if window is None else "short": create_causal_mask(
                config=config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
                and_mask_function=None if window is None else within(window),
                layer_idx=windows.index(window),
            )
            for window in set(windows)
        }
        seen = attention_mask if attention_mask is not None and attention_mask.ndim == 2 else None
        return masks | {"seen": None if seen is None else seen[:, -inputs_embeds.shape[1] :]}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as in the paper (Appendix C). The head and the last layer of each residual branch are zero."""
        start = getattr(module, "start", None)
        for name, weight in module.named_parameters(recurse=False):
            if name in STARTS:
                init.copy_(weight, torch.linspace(*STARTS[name], len(weight)))
                continue
            d_out, d_in = weight.shape[-2:]
            if start == "gate":
                init.uniform_(weight, 0, 0.02)
            elif start == "value":
                init.uniform_(weight, -((3 / d_in) ** 0.5), (3 / d_in) ** 0.5)
            elif start == "zero" or name == "down_proj":
                init.zeros_(weight)
            elif isinstance(module, nn.Embedding):
                init.normal_(weight)
            elif isinstance(module, Router):
                init.normal_(weight, std=d_in**-0.5)
            else:
                d_out = d_out // 2 if name == "gate_up_proj" else d_out
                init.normal_(weight, std=d_in**-0.5 * min(1, (d_out / d_in) ** 0.5))
        if isinstance(module, Router):
            for name, value in module.first_state().items():
                init.copy_(getattr(module, name), value)

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize the token embeddings and all tables of value embeddings."""
        embed: nn.Embedding = super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        for module in self.modules():
            if isinstance(module, Attention) and module.value_embed is not None:
                self._get_resized_embeddings(module.value_embed, len(embed.weight), mean_resizing=mean_resizing)
        return embed


class ExpertThresholdModel(ExpertThresholdPreTrainedModel):
    """The model without its language-model head."""

    def __init__(self, config: ExpertThresholdConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList([Block(config, layer) for layer in range(config.layers)])
        rules = [module.rule for module in self.modules() if isinstance(module, Router)]
        self.routes_by_token = all(rule.scope(training=False) == "token" for rule in rules)

        def scalars(count: int, there: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(count)) if there else None

        self.residual_scalars = scalars(config.layers, config.residual_scalars)
        self.skip_scalars = scalars(config.layers, config.skip_scalars)
        self.backout_scalar = scalars(1, config.backout)
        self.smear_scalar = scalars(1, config.smear)
        self.smear_channels = min(24, config.d_model)
        self.smear_gate = starting(nn.Linear(self.smear_channels, 1, bias=False), "gate") if config.smear else None
        self.gradient_checkpointing = False
        self._refuse_flat_batches()
        self.post_init()

    def _refuse_flat_batches(self, **kwargs: Any) -> None:
        """Raise ValueError if requests share a row and cache only keys and values but the model needs more than those.
        In vLLM and in transformers' continuous batching, it could silently read another request's tokens.
        """
        own = self.config._attn_implementation in (None, *ALL_MASK_ATTENTION_FUNCTIONS._global_mapping)
        flags = {"smear": "--no-model.smear", "key_offset": "--model.key-offset none"}
        needs = {name: flag for name, flag in flags.items() if getattr(self.config, name)}
        needs |= {} if self.routes_by_token else {f"rule {self.config.rule['name']}": "another --rule"}
        if needs and (not own or kwargs.get("cache") is not None):
            raise ValueError(
                f"{' and '.join(needs)}: this model reads previous tokens, which engines with flat batches (vLLM, "
                f"continuous batching) do not keep; use generate or et serve, or train with {' '.join(needs.values())}"
            )

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Any = None, position_ids: Tensor | None = None,
        past_key_values: Cache | None = None, inputs_embeds: Tensor | None = None, use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:  # fmt: skip
        """Run the model with the usual arguments of transformers. No token attends to one whose attention_mask is 0.

        Hidden states are the inputs of the blocks, before residual and skip scalars, followed by the head's input.
        Without a cache, sequences may share a row: a new one starts wherever position_ids do not increase by 1.
        """
        wants_attentions = kwargs.get("output_attentions", self.config.output_attentions)
        if wants_attentions and self.config._attn_implementation != "eager":
            raise ValueError("output_attentions=True needs attention weights; load with attn_implementation='eager'")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        self._refuse_flat_batches(**kwargs)
        embedded = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        continues = None
        if position_ids is not None and past_key_values is None and (self.config.smear or self.config.key_offset):
            continues = F.pad(position_ids[:, 1:] == position_ids[:, :-1] + 1, (1, 0), value=True)
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if not self.routes_by_token:
            self._require_whole_sequences(attention_mask, position_ids, past_key_values)
        if position_ids is None:
            position_ids = past + torch.arange(embedded.shape[1], device=embedded.device)[None]
        given = (self.config, embedded, attention_mask, past_key_values, position_ids)
        masks = attention_mask if isinstance(attention_mask, dict) else self.create_masks_for_generate(*given)
        seen = masks["seen"]
        if use_cache and self.routes_by_token and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        x = start = self.smeared(norm(embedded), seen, continues, past_key_values)
        cos, sin = self.rotary(position_ids, x.dtype)
        middle = x
        for layer, block in enumerate(self.blocks):
            if self.residual_scalars is not None:
                x = self.residual_scalars[layer].to(x) * x
            if self.skip_scalars is not None:
                x = x + self.skip_scalars[layer].to(x) * start.to(x.device)
            mask = masks["long" if self.config.window(layer) is None else "short"]
            x = block(x, cos, sin, mask, input_ids, seen, continues, past_key_values=past_key_values, **kwargs)
            if layer == self.config.layers // 2:
                middle = x
        if self.backout_scalar is not None:
            x = x - self.backout_scalar.to(x) * middle.to(x.device)
        return BaseModelOutputWithPast(last_hidden_state=norm(x), past_key_values=past_key_values)

    def _require_whole_sequences(self, mask: Any, position_ids: Tensor | None, cache: Cache | None) -> None:
        """Raise ValueError unless every row is a single whole sequence. Caches do not store the scores of earlier
        tokens, and scores of padding or of other sequences would be counted.
        """
        padded = isinstance(mask, Tensor) and not mask.all()
        packed = position_ids is not None and bool((position_ids.diff() != 1).any())
        if cache is not None or padded or packed:
            raise ValueError(
                "the routing rule needs whole sequences; pass use_cache=False, no padding, and one sequence per row"
            )

    def smeared(self, x: Tensor, seen: Tensor | None, continues: Tensor | None, cache: Cache | None) -> Tensor:
        """Return x_t + λ σ(gate(x_t)) x_{t−1} if the model has smear, else x. Padding adds nothing to the next token.

        The cache treats x_{t−1} as the state of a convolution of width 2 and keeps it in the first layer's entry.
        """
        if self.smear_gate is None:
            return x
        assert self.smear_scalar is not None
        before = x if seen is None else x * seen[..., None].to(x)
        if cache is not None:
            if not (len(cache.layers) and isinstance(cache.layers[0], LinearAttentionCacheLayerMixin)):
                raise ValueError("smear needs a cache made for this model; use DynamicCache(config=model.config)")
            before = cache.update_conv_state(before.mT, 0, conv_kernel_size=1).mT
        previous = F.pad(before, (0, 0, 1, 0))[:, -1 - x.shape[1] : -1]
        if continues is not None:
            previous = previous * continues[..., None].to(x)
        gates = self.smear_scalar.to(x) * self.smear_gate(x[..., : self.smear_channels]).sigmoid()
        y: Tensor = x + gates * previous
        return y

    def rotary(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (batch, 1, time, head_dim / 2) for positions (batch, time)."""
        head_dim = self.config.d_model // self.config.heads
        steps = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32)
        angles = position_ids[:, None, :, None] * self.config.rotary_base ** (-steps / head_dim)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class ExpertThresholdForCausalLM(ExpertThresholdPreTrainedModel, GenerationMixin):
    """The model with its language-model head."""

    def __init__(self, config: ExpertThresholdConfig) -> None:
        super().__init__(config)
        self.model = ExpertThresholdModel(config)
        self.lm_head = starting(nn.Linear(config.d_model, config.vocab_size, bias=False), "zero")
        self.post_init()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does, but without a cache if the rule needs whole sequences."""
        kwargs |= {} if self.model.routes_by_token else {"use_cache": False}
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Cache | None = None, inputs_embeds: Tensor | None = None, labels: Tensor | None = None,
        use_cache: bool | None = None, logits_to_keep: int | Tensor = 0, num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Return float32 logits and, if there are labels (batch, time), the loss. The label -100 is ignored."""
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
            return_dict=True,  # overrides the configuration
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept]).float()
        logits = self.config.softcap * torch.tanh(logits / self.config.softcap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, num_items_in_batch=num_items_in_batch)
        recorded = {name: output.get(name) for name in ("past_key_values", "hidden_states", "attentions")}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **recorded)


class ExpertThresholdForSequenceClassification(GenericForSequenceClassification, ExpertThresholdPreTrainedModel):
    """The model with a linear layer that scores each label at the last token."""

    def __init__(self, config: Any) -> None:
        ExpertThresholdPreTrainedModel.__init__(self, config)  # the other base uses AutoModel, which needs the network
        self.num_labels = config.num_labels
        self.model = ExpertThresholdModel(config)
        self.score = nn.Linear(config.d_model, config.num_labels, bias=False)
        self.post_init()


if __package__ == "expert_threshold.integrations":  # registering a copy would replace other folders' models
    AutoConfig.register("expert_threshold", ExpertThresholdConfig, exist_ok=True)
    AutoModel.register(ExpertThresholdConfig, ExpertThresholdModel, exist_ok=True)
    AutoModelForCausalLM.register(ExpertThresholdConfig, ExpertThresholdForCausalLM, exist_ok=True)
    AutoModelForSequenceClassification.register(
        ExpertThresholdConfig, ExpertThresholdForSequenceClassification, exist_ok=True
    )
    kernels = importlib.import_module("expert_threshold.integrations.experts")
    ALL_EXPERTS_FUNCTIONS.register("expert_threshold", kernels.routed_sum)


def __getattr__(name: str) -> Any:
    """Import `swap_rule` on demand: it needs the package, whereas exported copies of this file do not."""
    if name != "swap_rule":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("expert_threshold.integrations.swap").swap_rule

"""The trained model for Hugging Face transformers.

Importing this file registers the type `expert_threshold` with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`. It
only imports torch, transformers and the routing rule, because `et export` copies this file and the rule beside the
weights, so that a folder loads where the package is not installed (`trust_remote_code=True`).

Cutoffs stay as trained, in fine-tuning too: a token is routed by its own scores alone, so that padding and batches
change nothing. `expert_threshold.integrations.follow` moves them with the weights.
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
    raise ImportError(f"{error}; run: pip install 'transformers>=5.10.1' 'accelerate>=1.1'") from None
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_masks_for_generate
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple

try:
    from transformers.modeling_utils import slice_logits_to_keep
except ImportError:  # transformers 5.20 and older

    def slice_logits_to_keep(hidden_states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
        """Return the last `logits_to_keep` positions, all of them if it is 0, or the positions it lists."""
        return hidden_states[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]


RULE_FILE = "exported_rule"


def make_rule(options: dict[str, Any]) -> Any:
    """Return the rule of `{"name": …, option: value, …}`: from the file beside this one, else from the package."""
    try:
        from .exported_rule import RULE  # type: ignore[import-not-found]
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.endswith(RULE_FILE):
            raise
        from expert_threshold.routing import rule_from_dict

        return rule_from_dict(options)
    return RULE(**{name: value for name, value in options.items() if name != "name"})


class ExpertThresholdConfig(PreTrainedConfig):
    """The options of the model under their names in expert_threshold; `rule` holds all options of the routing rule.

    run: facts about the training run, for `et import`; they have no effect on the model.
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
    softcap: float | None = 15.0
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
        super().__post_init__(**kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save the configuration and the model's code, which `PreTrainedModel.save_pretrained` then pushes too."""
        assert self.rule is not None
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        for name, text in _sources(self.rule).items():
            (Path(save_directory) / name).write_text(text, encoding="utf-8")
        super().save_pretrained(save_directory, *args, **kwargs)

    def has_value_embedding(self, layer: int) -> bool:
        """Return True if the layer has a table of value embeddings."""
        alternates = self.value_embeddings == "alternate" and layer % 2 == (self.layers - 1) % 2
        return alternates or self.value_embeddings == "all"

    def has_key_offset(self, layer: int) -> bool:
        """Return True if half of each of the layer's keys is the previous token's."""
        return self.key_offset == "all" or (self.key_offset == "last" and layer == self.layers - 1)

    def window(self, layer: int) -> int | None:
        """Return the number of tokens before its own that a token sees in the layer; None for all."""
        if self.windows is None or layer == self.layers - 1 or self.windows[layer % len(self.windows)] == "L":
            return None
        return 128 * -(-self.context // 512) if self.short_window is None else self.short_window


def norm(x: Tensor) -> Tensor:
    """Parameter-free RMSNorm over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],))


def within(window: int) -> Callable[[int, int, int, int], bool]:
    """Return the mask (batch, head, query, key) of keys at most `window` before the query."""
    return lambda batch, head, query, key: key >= query - window


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of x (batch, heads, time, head_dim) against each other by the positions' angles (RoPE)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)


def delay(keys: Tensor, seen: Tensor | None) -> Tensor:
    """Return keys (batch, heads, time, head_dim), rotated, of which the half that rotates slowest is the previous
    token's, zeros for the first and after one whose `seen` (batch, time) is 0.
    """
    pairs = keys.shape[-1] // 2
    fast, slow = keys.unflatten(-1, (2, pairs)).split((pairs - pairs // 2, pairs // 2), -1)
    if seen is not None:
        slow = slow * seen[:, None, :, None, None].to(slow)
    return torch.cat((fast, F.pad(slow[:, :, :-1], (0, 0, 0, 0, 1, 0))), -1).flatten(-2)


class LastLinear(nn.Linear):
    """A linear layer that is initialized to zero."""


class ValueEmbedding(nn.Embedding):
    """A table of values, initialized like what projects them."""


class Gate(nn.Linear):
    """A linear layer of the first channels of its input; it is initialized to small positive weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[..., : self.in_features])


class Attention(nn.Module):
    """Causal self-attention with rotary positions and QK norm."""

    def __init__(self, config: ExpertThresholdConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.is_causal = True
        self.num_key_value_groups = config.heads // config.kv_heads
        self.head_dim = config.d_model // config.heads
        self.query = nn.Linear(config.d_model, config.heads * self.head_dim, bias=False)
        self.key = nn.Linear(config.d_model, config.kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(config.d_model, config.kv_heads * self.head_dim, bias=False)
        self.output = LastLinear(config.heads * self.head_dim, config.d_model, bias=False)
        self.value_embed: nn.Embedding | None = None
        if config.has_value_embedding(layer):
            self.value_embed = ValueEmbedding(config.vocab_size, config.kv_heads * self.head_dim)
            self.value_gate = Gate(min(12, config.d_model), config.kv_heads, bias=False)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cache: Cache | None,
        tokens: Tensor | None,
        seen: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        """x: (batch, time, d_model); cos, sin: (batch, 1, time, head_dim / 2); tokens, seen: (batch, time) or None."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        if self.value_embed is not None:
            if tokens is None:
                raise ValueError("value embeddings need the tokens; give input_ids, not inputs_embeds")
            gates = 3 * self.value_gate(x).sigmoid().transpose(1, 2)[..., None]
            v = v + gates * self.value_embed(tokens).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k = (norm(rotate(each, cos, sin)).to(v.dtype) for each in (q, k))  # under autocast norms return float32
        if self.config.has_key_offset(self.layer):
            k = delay(k, seen)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        attend = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation, sdpa_attention_forward)
        y, _ = attend(self, q, k, v, mask, scaling=self.config.qk_scale**2 * self.head_dim**-0.5, **kwargs)
        output: Tensor = self.output(y.flatten(2))
        return output


class FeedForward(nn.Module):
    """down · relu(up · x)², or down · (silu(gate · x) · (up · x))."""

    def __init__(self, d_model: int, d_hidden: int, activation: str) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_hidden, bias=False)
        self.gate = nn.Linear(d_model, d_hidden, bias=False) if activation == "swiglu" else None
        self.down = LastLinear(d_hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y: Tensor = self.down(h.relu().square() if self.gate is None else F.silu(self.gate(x)) * h)
        return y


class Router(nn.Module):
    """Computes scores in float32 and routes them by the rule, as in inference.

    Weight and state have dtypes of their own, which transformers keeps when it loads a model in another dtype.
    The state is saved with the weights, keeps its dtypes under any cast, and is never updated here.
    """

    def __init__(self, d_model: int, rule: dict[str, Any]) -> None:
        super().__init__()
        self.rule = rule
        self.routing = make_rule(rule)
        self.weight = nn.Parameter(torch.empty(self.routing.num_scores, d_model, dtype=torch.float32))
        for name, value in self.first_state().items():
            self.register_buffer(name, value)

    def first_state(self) -> dict[str, Tensor]:
        """Return the buffers before training."""
        first = self.routing.init()._asdict()
        return {f"state_{name}": v.float() if v.is_floating_point() else v for name, v in first.items()}

    def forward(self, x: Tensor) -> Any:
        """x: (batch, time, d_model). Returns the rule's routing: gates, assignment, passthrough."""
        with torch.autocast(x.device.type, enabled=False):  # autocast would round the scores
            scores = F.linear(x.float(), self.weight.float())
        first = self.routing.init()
        state = type(first)(*(getattr(self, f"state_{name}") for name in first._fields))
        return self.routing.route(scores, state, training=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if new.dtype != old.dtype:
                setattr(self, name, old.to(new.device))
        return self


class Experts(nn.Module):
    """The weights of all routed experts, stacked."""

    def __init__(self, num_experts: int, d_model: int, d_expert: int, activation: str) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(num_experts, d_expert, d_model))
        self.gate = nn.Parameter(torch.empty_like(self.up)) if activation == "swiglu" else None
        self.down = nn.Parameter(torch.empty(num_experts, d_model, d_expert))

    def forward(self, x: Tensor, gates: Tensor, assignment: Tensor) -> Tensor:
        """Σ_i z[t,i] · g[t,i] · expert_i(x_t); x: (tokens, d_model), gates and assignment: (tokens, experts)."""
        y = torch.zeros_like(x)
        for i in assignment.any(0).nonzero()[:, 0].tolist():
            rows = assignment[:, i].nonzero()[:, 0]
            h = F.linear(x[rows], self.up[i])
            a = h.relu().square() if self.gate is None else F.silu(F.linear(x[rows], self.gate[i])) * h
            y = y.index_add(0, rows, F.linear(a, self.down[i]) * gates[rows, i, None].to(x.dtype))
        return y


class MoE(nn.Module):
    """y_t = shared(x_t) + Σ_i z[t,i] · g[t,i] · expert_i(x_t), the gates g from the rule."""

    def __init__(self, config: ExpertThresholdConfig) -> None:
        super().__init__()
        assert config.rule is not None
        self.gate_norm = config.gate_norm
        self.router = Router(config.d_model, config.rule)
        self.num_experts = config.rule["num_experts"]
        self.experts = Experts(self.num_experts, config.d_model, config.d_expert, config.activation)
        width = config.shared_experts * config.d_expert
        self.shared = FeedForward(config.d_model, width, config.activation) if width else None

    def forward(self, x: Tensor) -> Tensor:
        routing = self.router(x)
        gates, assignment = (part[..., : self.num_experts] for part in (routing.gates, routing.assignment))
        if self.gate_norm == "fanout":
            gates = gates / assignment.sum(-1, keepdim=True).clamp(min=1)
        y: Tensor = self.experts(x.flatten(0, 1), gates.flatten(0, 1), assignment.flatten(0, 1)).view_as(x)
        if routing.passthrough is not None:
            y = y + routing.passthrough[..., None].to(x.dtype) * x
        return y if self.shared is None else y + self.shared(x)


class Block(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + feed-forward(norm(x)), the feed-forward dense or of experts."""

    def __init__(self, config: ExpertThresholdConfig, layer: int) -> None:
        super().__init__()
        assert config.rule is not None
        dense = config.rule["name"] == "dense" or layer < config.dense_layers
        self.attention = Attention(config, layer)
        self.feed_forward = FeedForward(config.d_model, config.d_feed_forward, config.activation) if dense else None
        self.moe = None if dense else MoE(config)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = x + self.attention(norm(x), *args, **kwargs)
        feed_forward = self.moe if self.feed_forward is None else self.feed_forward
        assert feed_forward is not None
        y: Tensor = x + feed_forward(norm(x))
        return y


def _sources(rule: dict[str, Any]) -> dict[str, str]:
    """Return the texts of this file and of the rule's files, by their names in an exported folder."""
    here = Path(__file__)
    if (here.parent / f"{RULE_FILE}.py").is_file() or __package__ != "expert_threshold.integrations":
        files = (path for path in here.parent.glob("*.py") if path.name != "__init__.py")
        return {path.name: path.read_text(encoding="utf-8") for path in files}
    # Transformers refuses to load a file that contains an import statement of a missing package.
    rule_source = importlib.import_module("expert_threshold.integrations.rule_source")
    made = None if rule["name"] == "dense" else make_rule(rule)
    return {"modeling_expert_threshold.py": here.read_text(encoding="utf-8"), **rule_source.rule_files(made)}


STARTS = {
    "residual_scalars": (1.15, 1.05),
    "skip_scalars": (0.20, 0.05),
    "backout_scalar": (0.2, 0.2),
    "smear_scalar": (0.0, 0.0),
}
"""The first and the last of a parameter's numbers before training."""


class ExpertThresholdPreTrainedModel(PreTrainedModel):
    """The base of both models below."""

    config_class = ExpertThresholdConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embed"
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True

    @staticmethod
    def create_masks_for_generate(config: ExpertThresholdConfig, attention_mask: Tensor | None, **given: Any) -> Any:
        """Return the mask for a static cache, or the given one if layers have windows, which `forward` applies."""
        if config.windows is not None:
            return attention_mask
        return create_masks_for_generate(config=config, attention_mask=attention_mask, **given)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as the paper does (Appendix C): the ends of residual branches, and the head, start at zero."""
        for name, weight in module.named_parameters(recurse=False):
            if name in STARTS:
                init.copy_(weight, torch.linspace(*STARTS[name], len(weight)))
                continue
            d_out, d_in = weight.shape[-2:]
            if isinstance(module, Gate):
                init.uniform_(weight, 0, 0.02)
            elif isinstance(module, ValueEmbedding):
                init.uniform_(weight, -((3 / d_in) ** 0.5), (3 / d_in) ** 0.5)
            elif isinstance(module, LastLinear) or name == "down":
                init.zeros_(weight)
            elif isinstance(module, nn.Embedding):
                init.normal_(weight)
            elif isinstance(module, Router):
                init.normal_(weight, std=d_in**-0.5)
            else:
                init.normal_(weight, std=d_in**-0.5 * min(1, (d_out / d_in) ** 0.5))
        if isinstance(module, Router):
            for name, value in module.first_state().items():
                init.copy_(getattr(module, name), value)


class ExpertThresholdModel(ExpertThresholdPreTrainedModel):
    """The model without its head."""

    def __init__(self, config: ExpertThresholdConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList([Block(config, layer) for layer in range(config.layers)])
        routers = [module for module in self.modules() if isinstance(module, Router)]
        self.routes_by_token = all(router.routing.scope(training=False) == "token" for router in routers)

        def scalars(count: int, there: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(count)) if there else None

        self.residual_scalars = scalars(config.layers, config.residual_scalars)
        self.skip_scalars = scalars(config.layers, config.skip_scalars)
        self.backout_scalar = scalars(1, config.backout)
        self.smear_scalar = scalars(1, config.smear)
        self.smear_gate = Gate(min(24, config.d_model), 1, bias=False) if config.smear else None
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Take the usual arguments of transformers; no token attends to one whose attention_mask is 0.

        Hidden states are the inputs of the blocks, before residual and skip scalars, followed by the head's input.
        """
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ValueError("output_attentions=True, but attention weights are never computed; leave it out")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        embedded = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if not self.routes_by_token:  # no cache holds the scores of earlier tokens, and padding's would count
            if past_key_values is not None or (attention_mask is not None and not attention_mask.all()):
                raise ValueError("the routing rule looks at whole sequences; pass use_cache=False, and no padding")
            use_cache = False
        if self.config.smear or self.config.key_offset:  # no cache holds the previous token's embedding and key
            if past_key_values is not None:
                raise ValueError("smear and key offset read the previous token; pass use_cache=False")
            use_cache = False
        if use_cache and past_key_values is None and not (self.training and self.gradient_checkpointing):
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = past + torch.arange(embedded.shape[1], device=embedded.device)[None]
        windows = [self.config.window(layer) for layer in range(self.config.layers)]
        if attention_mask is not None and attention_mask.ndim != 2 and set(windows) != {None}:
            raise ValueError("windows are made from an attention_mask (batch, time); give one of this shape")
        masks = {
            window: create_causal_mask(
                config=self.config,
                inputs_embeds=embedded,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
                and_mask_function=None if window is None else within(window),
            )
            for window in set(windows)
        }
        seen = None if attention_mask is None or attention_mask.ndim != 2 else attention_mask
        x = start = self.smeared(norm(embedded), seen)
        cos, sin = self.rotary(position_ids, x.dtype)
        middle = x
        shown = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        entering: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            if shown:
                entering.append(x)
            if self.residual_scalars is not None:
                x = self.residual_scalars[layer].to(x) * x
            if self.skip_scalars is not None:
                x = x + self.skip_scalars[layer].to(x) * start.to(x.device)
            x = block(x, cos, sin, masks[windows[layer]], past_key_values, input_ids, seen, **kwargs)
            if layer == self.config.layers // 2:
                middle = x
        if self.backout_scalar is not None:
            x = x - self.backout_scalar.to(x) * middle.to(x.device)
        x = norm(x)
        states = (*entering, x) if shown else None
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=past_key_values, hidden_states=states)

    def smeared(self, x: Tensor, seen: Tensor | None) -> Tensor:
        """Return x_t + λ σ(gate(x_t)) x_{t−1} where the model has smear; padding adds nothing to what follows."""
        if self.smear_gate is None:
            return x
        assert self.smear_scalar is not None
        before = x if seen is None else x * seen[..., None].to(x)
        gates = self.smear_scalar.to(x) * self.smear_gate(x).sigmoid()
        y: Tensor = x + gates * F.pad(before[:, :-1], (0, 0, 1, 0))
        return y

    def rotary(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (batch, 1, time, head_dim / 2) of positions (batch, time)."""
        head_dim = self.config.d_model // self.config.heads
        steps = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32)
        angles = position_ids[:, None, :, None] * self.config.rotary_base ** (-steps / head_dim)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class ExpertThresholdForCausalLM(ExpertThresholdPreTrainedModel, GenerationMixin):
    """The language model."""

    def __init__(self, config: ExpertThresholdConfig) -> None:
        super().__init__(config)
        self.model = ExpertThresholdModel(config)
        self.lm_head = LastLinear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """labels: (batch, time), usually the input itself, -100 where no loss is wanted; logits: float32."""
        output = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            **kwargs,
            return_dict=True,  # even if the configuration says otherwise
        )
        logits = self.lm_head(slice_logits_to_keep(output.last_hidden_state, logits_to_keep)).float()
        if self.config.softcap is not None:
            logits = self.config.softcap * torch.tanh(logits / self.config.softcap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, num_items_in_batch=num_items_in_batch)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=output.past_key_values, hidden_states=output.hidden_states
        )


if __package__ == "expert_threshold.integrations":  # a registered copy would stand in for those of other folders
    AutoConfig.register("expert_threshold", ExpertThresholdConfig, exist_ok=True)
    AutoModel.register(ExpertThresholdConfig, ExpertThresholdModel, exist_ok=True)
    AutoModelForCausalLM.register(ExpertThresholdConfig, ExpertThresholdForCausalLM, exist_ok=True)

"""Small models of transformers with random weights, none of them zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 24, "pad_token_id": 0}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {},
    "Olmoe": {},
    "Qwen3Moe": {},
    "GptOss": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
    "DeepseekV3": LATENT | GROUPS | {"first_k_dense_replace": 1, "n_shared_experts": 1, "head_dim": 8},
    "NemotronH": GROUPS
    | {"layers_block_type": ["attention", "moe"], "moe_shared_expert_intermediate_size": 24, "moe_latent_size": 16},
}


def random_model(name: str, options: dict[str, Any], seed: int = 0) -> Any:
    import transformers

    torch.manual_seed(seed)
    options = SMALL | options
    options.pop("head_dim" if name == "Falcon" else "", None)  # it has no such option
    config = getattr(transformers, f"{name}Config")(**options)
    cls = getattr(transformers, f"{name}LMHeadModel", None) or getattr(transformers, f"{name}ForCausalLM")
    model = cls(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, std=0.1)
    return model


def mixture(name: str = "Olmoe") -> Any:
    """A model of that architecture, "normalised" or not, with eight experts, of which a token gets two."""
    architecture, *normalised = name.split(", ")
    options = EXPERTS | MIXTURES[architecture] | ({"norm_topk_prob": True} if normalised else {})
    return random_model(architecture, options)

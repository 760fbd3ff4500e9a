"""The Mixture-of-Experts layer in place of the feed-forward in the Llama blocks of transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from expert_threshold import ExpertThreshold, MoE, follow


class FeedForward(nn.Module):
    """The feed-forward of a Llama block: maps hidden states (batch, time, d_model) to the same shape."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        rule = ExpertThreshold(num_experts=8, experts_per_token=1, warmup_steps=4, decay=0.9)
        self.moe = MoE(config.hidden_size, config.intermediate_size // 2, rule, activation="swiglu")

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.moe(x)
        return y


def main(steps: int = 8) -> list[float]:
    """Train a tiny model for a few steps on one batch and return the losses."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    for layer in model.model.layers:
        layer.mlp = FeedForward(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    follow(model, optimizer)
    tokens = torch.randint(config.vocab_size, (4, 64))
    losses = []
    for step in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}  loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()

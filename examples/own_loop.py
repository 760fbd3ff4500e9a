"""The Mixture-of-Experts layer in your own training loop, with any torch optimizer.

With `follow`, backward also adds the gradients of the rules' losses, and each `optimizer.step()` updates cutoffs and
biases from the batches since the last step.
"""

from __future__ import annotations

import torch
from torch import nn

from expert_threshold import ExpertThreshold, MoE, follow


class Block(nn.Module):
    """y = x + moe(norm(x))."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model)
        self.moe = MoE(d_model, 2 * d_model, ExpertThreshold(num_experts=8, warmup_steps=10, decay=0.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.moe(self.norm(x))
        return x + y


def main(steps: int = 60) -> list[float]:
    """Learn a map from tokens to tokens and return the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), Block(32), Block(32), nn.Linear(32, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    follow(model, optimizer)
    losses = []
    for step in range(steps):
        tokens = torch.randint(64, (8, 32))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (5 * tokens.flatten() + 1) % 64)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step:3d}  loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()

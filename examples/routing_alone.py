"""Routing rules by themselves, on a score matrix: how evenly each loads the experts, and whether it looks ahead."""

from __future__ import annotations

import torch

from expert_threshold import ExpertChoice, ExpertThreshold, TokenChoice

EXPERTS, STEPS = 8, 200
RULES = {
    "token choice": TokenChoice(EXPERTS, 1),
    "token choice, loss-free": TokenChoice(EXPERTS, 1, balance="loss_free"),
    "expert choice": ExpertChoice(EXPERTS, 1, pool="batch"),
    "expert threshold": ExpertThreshold(EXPERTS, 1, warmup_steps=20, decay=0.9),
}


def scores(step: int) -> torch.Tensor:
    """Return the scores of a batch of 4 × 256 tokens, (batch, time, experts); some experts score higher."""
    noise = torch.randn(4, 256, EXPERTS, generator=torch.Generator().manual_seed(step))
    return noise + torch.linspace(-1, 1, EXPERTS)


def main() -> None:
    for name, rule in RULES.items():
        state = rule.init()
        for step in range(STEPS):
            routing = rule.route(scores(step), state, training=True)
            state = rule.update(state, routing.observation)  # once per optimizer step
        seen = rule.route(scores(STEPS), state, training=False).observation
        loads = " ".join(f"{load:4d}" for load in seen.load.tolist())
        print(f"{name:24} loads {loads}   fanout {seen.fanout_mean:.2f} ± {seen.fanout_std:.2f}   "
              f"scope in training: {rule.scope(training=True)}")  # fmt: skip


if __name__ == "__main__":
    main()

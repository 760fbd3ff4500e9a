"""A model of OLMoE's shape, trained by transformers' Trainer with expert threshold instead of top-k.

The same lines train OLMoE itself: load it with `OlmoeForCausalLM.from_pretrained` and omit `CONFIG`.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM, Trainer, TrainingArguments

from expert_threshold import ExpertThreshold, follow
from expert_threshold.integrations.swap import swap_rule

# As in OLMoE-1B-7B, but with narrower layers: 64 experts, 8 per token, softmax gates that are not normalised.
CONFIG = OlmoeConfig(
    vocab_size=256, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_experts=64, num_experts_per_tok=8, norm_topk_prob=False, pad_token_id=0, eos_token_id=0,
)  # fmt: skip
RULE = ExpertThreshold(num_experts=64, experts_per_token=8, gate="softmax", warmup_steps=5, decay=0.9)


class FollowingTrainer(Trainer):
    """Updates cutoffs once per optimizer step."""

    def create_optimizer(self, *arguments: object, **options: object) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*arguments, **options)
        follow(self.model, optimizer, loss_scale=1 / self.args.gradient_accumulation_steps)
        return optimizer


def main(steps: int = 20) -> tuple[list[float], float]:
    """Learn to count and return the losses and the mean fanout in inference."""
    torch.manual_seed(0)
    model = swap_rule(OlmoeForCausalLM(CONFIG), RULE)
    rows = [(torch.arange(32) + start) % 256 for start in torch.randint(256, (8 * steps,)).tolist()]
    data = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=8, learning_rate=3e-3, logging_steps=1,
            report_to=[], disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False, use_cpu=True,
        )  # fmt: skip
        trainer = FollowingTrainer(model, arguments, train_dataset=data)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    fanouts: list[torch.Tensor] = []
    for layer in model.eval().model.layers:
        layer.mlp.gate.register_forward_hook(lambda *given: fanouts.append(given[2].assignment.sum(-1).float().mean()))
    with torch.no_grad():
        model(torch.stack(rows[:8]))
    return losses, float(torch.stack(fanouts).mean())


if __name__ == "__main__":
    losses, fanout = main()
    print(f"loss {losses[0]:.3f} at the start, {losses[-1]:.3f} at the end; fanout {fanout:.2f}")

"""Loads the trained model of a run folder."""

from __future__ import annotations

from pathlib import Path

import torch

from ..data import Tokenizer
from ..model import GPT, GPTConfig
from .folder import RunFolder


def load_model(
    run: str | Path,
    step: int | None = None,
    device: str | torch.device = "cpu",
    compute_dtype: torch.dtype = torch.float32,
    rate: float | None = None,
) -> tuple[GPT, Tokenizer]:
    """Return the model of a run, saved at `step` or last, in evaluation mode, and the run's tokenizer.

    Weights are in the compute dtype, the routers' in float32; to continue training, read the checkpoint instead.
    rate: mean fanout, see `GPT.set_rate`.
    Raises ValueError if the folder, the checkpoint or the tokenizer is missing, damaged or foreign, or if the model
    has no such rate.
    """
    folder = RunFolder.open(run)
    weights = folder.load_checkpoint(step, parts=("model",)).tensors["model"]
    with folder.named(), torch.device("meta"):
        model = GPT(GPTConfig.from_dict(folder.config), compute_dtype=compute_dtype)
    model.to_empty(device=device)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder.path}: checkpoint and config.json disagree: {reason}") from error
    routers = {moe.router.weight for _, moe in model.moe_layers()}
    for weight in model.parameters():
        if weight not in routers:
            weight.data = weight.data.to(compute_dtype)  # once, not in every forward
    model.set_rate(rate)
    return model.eval(), folder.tokenizer()

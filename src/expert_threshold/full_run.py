"""A whole run: training with samples of text on the way and a report at the end."""

from __future__ import annotations

from functools import partial
from typing import Any

from rich.console import Console

from .analysis.report import write_report
from .config import RunConfig
from .data import Tokenizer
from .distributed import ALONE
from .errors import is_out_of_memory
from .generate import generate
from .model import GPT
from .runs import RunFolder
from .train import TrainResult, train
from .train.log import say

# An empty prompt, which starts a document, code, and prose. No prompt ends with a space, since the tokens of words
# start with a space: after "def ", a model writes digits. Without the penalty, small models repeat themselves.
PROMPTS = ("", "def read", "Return")
SAMPLING: dict[str, Any] = {"max_tokens": 96, "temperature": 0.6, "repetition_penalty": 1.2, "seed": 0}


def train_run(folder: RunFolder, config: RunConfig, console: Console, **options: Any) -> TrainResult:
    """Train in a folder and write samples and a report. Raises ValueError as `train` does, and if memory runs out."""
    try:
        result = train(folder, config, sample=sample, console=console, **options)
    except (RuntimeError, MemoryError, TypeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(
            "out of memory; use a smaller --batch-size with more --accumulation, --train.activation-checkpointing, "
            "or a smaller model"
        ) from error
    if not options.get("rendezvous", ALONE).is_main:
        return result
    try:
        write_report(folder, partial(say, console))
    except Exception as error:  # a failed report does not spoil the run
        reason = " ".join(str(error).split()) or type(error).__name__
        say(console, f"warning: the report was not written: {reason}")
    return result


def sample(model: GPT, tokenizer: Tokenizer, step: int) -> str:
    """Return the model's continuations of a few fixed prompts, with a fixed seed."""
    texts = []
    for prompt in PROMPTS:
        steps = generate(model, tokenizer, prompt, **SAMPLING)
        texts.append(f"--- step {step}, prompt {prompt!r}\n{prompt}{''.join(s.text for s in steps)}\n")
    return "\n".join(texts)

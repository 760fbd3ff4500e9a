"""Loads the models that `et audit` supports: our runs, and causal language models from transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data.public import hub_errors
from ..files import read_json
from ..runs import RunFolder, load_model
from ..runs.folder import FORMAT


def load_any(name: str, step: int | None, device: torch.device, dtype: torch.dtype | str) -> tuple[nn.Module, Any]:
    """Load a model, in evaluation mode, and its tokenizer. name: a run folder, or a model's name for transformers.

    Raises ValueError with a one-line message if there is no such model, or if it is incomplete or not supported.
    """
    path = Path(name)
    config = path / "config.json"
    if not path.is_dir() and (path.parent.is_dir() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name)):
        raise ValueError(f"{name} does not exist; use a run folder, or OWNER/NAME on the hub")
    if path.is_dir() and not config.is_file():
        raise ValueError(f"{name} contains no config.json; use the folder of a run or of a transformers model")
    if path.is_dir() and read_json(config).get("format") == FORMAT:
        assert isinstance(dtype, torch.dtype)
        return load_model(RunFolder.open(name).path, step, device, dtype)
    if step is not None:
        raise ValueError(f"--step {step}: {name} is not a run folder, so it has no steps; omit --step")
    try:
        from . import transformers as _ours  # noqa: F401  registers our exports with transformers
    except ImportError as error:
        raise ValueError(str(error)) from None
    from huggingface_hub.utils import logging as hub_logging
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from .swap import SAVED, swap_rule

    hub_logging.set_verbosity_error()  # each retry logs a warning
    logging.set_verbosity_error()  # the causes of its warnings are checked here
    logging.disable_progress_bar()
    if not path.is_dir():
        with hub_errors(f"{name}, which is not a folder here,") as hub:
            if hub.try_to_load_from_cache(name, "config.json") is None:  # otherwise no network is needed
                hub.HfApi().model_info(name, timeout=10)  # asks once, whereas transformers would retry for a minute
    loader: Any = AutoModelForCausalLM
    try:
        model, info = loader.from_pretrained(name, dtype=dtype, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises many types of errors if files are missing, damaged or unknown
        reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        raise ValueError(f"{name} is not a causal language model that transformers can load: {reason}") from None
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{name}: {len(missing)} weights are missing, such as {missing[0]}; use a complete model")
    if len(tokenizer) > (rows := model.get_input_embeddings().num_embeddings):
        raise ValueError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens, but the model has only {rows}; use its own tokenizer"
        )
    tokenizer.model_max_length = 10**9  # documents are cut into windows here
    if hasattr(model.config, SAVED):
        swap_rule(model)  # the folder was saved with another rule than its architecture's
    return model.to(device).eval(), tokenizer

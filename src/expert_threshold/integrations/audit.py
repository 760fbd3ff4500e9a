"""Loads the models that `et audit` can read: our run folders, and causal models of transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..files import read_json
from ..runs import RunFolder, load_model
from ..runs.folder import FORMAT


def load_any(name: str, step: int | None, device: torch.device, dtype: torch.dtype | str) -> tuple[nn.Module, Any]:
    """Return a model in evaluation mode and its tokenizer. name: a run folder, or a folder or a name for transformers.

    Raises ValueError, in one line, for anything else, for weights that are missing, and for an unknown architecture.
    """
    path = Path(name)
    config = path / "config.json"
    if not path.is_dir() and (path.parent.is_dir() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name)):
        raise ValueError(f"{name}: no such folder; name a run folder, or OWNER/NAME of the hub")
    if path.is_dir() and not config.is_file():
        raise ValueError(f"{name}: no model (no config.json); name a run folder, or a model of transformers")
    if path.is_dir() and read_json(config).get("format") == FORMAT:
        assert isinstance(dtype, torch.dtype)
        return load_model(RunFolder.open(name).path, step, device, dtype)
    if step is not None:
        raise ValueError(f"--step {step}: {name} is no run folder of ours, so it has no steps; leave --step out")
    try:
        from . import transformers as _ours  # noqa: F401  makes transformers know our exports
    except ImportError as error:
        raise ValueError(str(error)) from None
    from huggingface_hub.utils import logging as hub_logging
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    hub_logging.set_verbosity_error()  # each retry is a warning
    logging.set_verbosity_error()  # what it warns of is checked here
    logging.disable_progress_bar()
    try:
        loader: Any = AutoModelForCausalLM
        model, info = loader.from_pretrained(name, dtype=dtype, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises errors of many types for what is missing, damaged or unknown
        reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        raise ValueError(f"{name}: not a causal model that transformers can load: {reason}") from None
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{name}: lacks weights ({len(missing)}, such as {missing[0]}); name a whole checkpoint")
    if len(tokenizer) > (rows := model.get_input_embeddings().num_embeddings):
        raise ValueError(
            f"{name}: its tokenizer has {len(tokenizer)} tokens, its embedding {rows}; name a matching pair"
        )
    tokenizer.model_max_length = 10**9  # documents are cut here, into windows
    return model.to(device).eval(), tokenizer

"""Converts a run into a folder for Hugging Face, and back, without needing Hugging Face's packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..data import BOS
from ..files import corrupted_file_error, new_folder, read_json, require_free, to_json, write_synced
from ..model import GPT, GPTConfig
from ..runs import RunFolder, load_model
from ..runs.checkpoint import save_tensors
from ..runs.folder import read_tokenizer
from .card import model_card
from .rule_source import rule_files

MODEL_TYPE = "expert_threshold"
MODELING = "modeling_expert_threshold"
PREFIX = "model."
HEAD = ("head.weight", "lm_head.weight")
FACTS = ("data", "optim", "train", "corpus", "versions")
"""The sections of a run's config.json that are exported beside the model."""


def export_run(path: str | Path, to: str | Path, step: int | None = None) -> Path:
    """Write a run's model at `step`, or its last, with its tokenizer and a model card into the folder `to`.

    The folder appears complete or not at all. Raises ValueError if the run cannot be read or `to` is not empty.
    """
    run, to = RunFolder.open(path), Path(to)
    require_free(to)
    step = run.load_checkpoint(step, parts=()).step
    model, tokenizer = load_model(path, step)
    with new_folder(to) as temporary:
        for name, content in {
            "config.json": _config(model.config, tokenizer.bos, _facts(run, step)),
            "generation_config.json": _ids(tokenizer.bos) | _cache(model.config),
            "tokenizer_config.json": _tokenizer_config(model.config.context),
        }.items():
            write_synced(temporary / name, (to_json(content, indent=2) + "\n").encode())
        tokenizer.save_tokenizer_json(temporary / "tokenizer.json")
        modeling = Path(__file__).with_name("transformers.py").read_text(encoding="utf-8")
        for name, text in {f"{MODELING}.py": modeling, **rule_files(model.config.rule)}.items():
            write_synced(temporary / name, text.encode())
        write_synced(temporary / "README.md", model_card(run, model.config, step, to.name).encode())
        weights = {_outside(name): tensor for name, tensor in model.state_dict().items()}
        save_tensors(temporary / "model.safetensors", weights, {"format": "pt"})
        for file in temporary.iterdir():
            file.chmod(0o644)
    return to


def import_folder(path: str | Path, out: str | Path) -> RunFolder:
    """Make a run folder from what `export_run` wrote, or what transformers saved from it, fine-tuned or not.

    Its checkpoint holds weights only: it can be used and initialized from, but not resumed. Raises ValueError if the
    folder is of another kind, is incomplete, or holds weights or a tokenizer of another model.
    """
    path = Path(path)
    config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    if config.get("model_type") != MODEL_TYPE:
        raise ValueError(f"{path}: no config.json with model_type {MODEL_TYPE}; name a folder that et export wrote")
    options = {f.name: config[f.name] for f in fields(GPTConfig) if f.name in config}
    try:
        gpt_config = GPTConfig.from_dict(options)
    except ValueError as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from error
    weights = {_inside(name): tensor for name, tensor in _load(path).items()}
    with torch.device("meta"):
        model = GPT(gpt_config)
    # Other programs save in dtypes of their own: weights in half precision, counters as floats.
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    weights = {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in weights.items()}
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{path}: weights and config.json disagree: {' '.join(str(error).split())}") from None
    tokenizer = read_tokenizer(RunFolder(path).tokenizer_path)  # has the same name in both kinds of folder
    if tokenizer.vocab_size != gpt_config.vocab_size:
        raise ValueError(
            f"{path}: tokenizer.json has {tokenizer.vocab_size} tokens but the model {gpt_config.vocab_size}; "
            "save the model's own tokenizer there"
        )
    facts, step = _told_facts(path, config)
    with new_folder(out, "--out") as temporary:
        run = RunFolder(temporary)
        run.write_config({"model": gpt_config.to_dict()} | facts)
        tokenizer.save(run.tokenizer_path)
        run.save_checkpoint(step, {"model": model.state_dict()}, {})
    return RunFolder.open(out)


def _told_facts(path: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return what `_facts` exported: the sections, and the step. Raises ValueError if they are damaged."""
    with corrupted_file_error(path / "config.json", "export the model again"):
        run = config.get("run") or {}
        step = run.get("step", 0)
        if type(step) is not int or step < 0:
            raise ValueError(f"its run's step is {step!r}")
        facts = {name: dict(run[name]) for name in FACTS if name in run}
        to_json(facts)  # refuses NaN
        return facts, step


def _outside(name: str) -> str:
    return HEAD[1] if name == HEAD[0] else PREFIX + name


def _inside(name: str) -> str:
    return HEAD[0] if name == HEAD[1] else name.removeprefix(PREFIX)


def _load(path: Path) -> dict[str, Tensor]:
    """Load the weights from one file, or from several that an index lists."""
    index = path / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        with corrupted_file_error(index, "export or save the model again"):
            files = set(map(str, read_json(index)["weight_map"].values()))
    weights: dict[str, Tensor] = {}
    for name in sorted(files):
        if Path(name).name != name:
            raise ValueError(f"{index}: lists {name!r}, which is not a file of this folder")
        if not (path / name).is_file():
            raise ValueError(f"{path / name}: the file is missing; export or save the model again")
        try:
            weights |= load_file(path / name)
        except SafetensorError as error:
            raise ValueError(f"{path / name}: damaged ({error}); export or save the model again") from None
    if odd := [name for name, tensor in weights.items() if tensor.is_complex()]:
        raise ValueError(f"{path}: {odd[0]} is complex, as no weight is; export or save the model again")
    return weights


def _facts(run: RunFolder, step: int) -> dict[str, Any]:
    """Return the facts of the training run to export. The text is reduced to its name, since folders are shared."""
    config = run.config
    facts = {"step": step} | {name: config[name] for name in FACTS if name in config}
    with corrupted_file_error(run.path / "config.json", "restore it from a copy, or train again"):
        if "data" in facts:
            facts["data"] = facts["data"] | {"source": Path(facts["data"]["source"]).name}
        if "corpus" in facts:
            facts["corpus"] = facts["corpus"] | {"name": Path(facts["corpus"]["name"]).name}
    return facts


def _ids(bos: int) -> dict[str, int]:
    """Return the special tokens. A document ends where the next opens; padding is masked, so any token serves."""
    return {"bos_token_id": bos, "eos_token_id": bos, "pad_token_id": bos}


def _cache(config: GPTConfig) -> dict[str, bool]:
    """Disable the cache where it lacks what is needed of earlier tokens: scores, the embedding, or the whole key."""
    by_token = config.rule is None or config.rule.scope(training=False) == "token"
    return {} if by_token and not (config.smear or config.key_offset) else {"use_cache": False}


def _config(config: GPTConfig, bos: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    classes = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
    return {
        "architectures": ["ExpertThresholdForCausalLM"],
        "auto_map": {auto: f"{MODELING}.ExpertThreshold{ours}" for auto, ours in classes.items()},
        "model_type": MODEL_TYPE,
        "dtype": "float32",
        **config.to_dict(),
        **_ids(bos),
        "tie_word_embeddings": False,
        **_cache(config),
        "run": facts,
    }


def _tokenizer_config(context: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": BOS,
        "pad_token": BOS,
        "model_max_length": context,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        # The characters "<|bos|>" in a text are ordinary text, as in training.
        "split_special_tokens": True,
    }

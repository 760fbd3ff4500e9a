"""Converts a run to a folder for Hugging Face and back without needing Hugging Face's packages.

With huggingface_hub, such a folder can also be on the hub, where it is named `hub:OWNER/NAME`.
"""

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
from ..data.public import cache_folder, hub_errors
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
ARCHITECTURE = "ExpertThresholdForCausalLM"
AUTO_MAP = {
    "AutoConfig": f"{MODELING}.ExpertThresholdConfig",
    "AutoModel": f"{MODELING}.ExpertThresholdModel",
    "AutoModelForCausalLM": f"{MODELING}.{ARCHITECTURE}",
    "AutoModelForSequenceClassification": f"{MODELING}.ExpertThresholdForSequenceClassification",
}
SOFTCAP = "final_logit_softcapping"
"""The name under which inference engines look for the softcap."""
HUB = "hub:"
FILES = ["*.json", "*.safetensors"]
"""The files that `import_folder` reads, none of which is code."""
WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
"""Files of earlier pushes to delete, because they could be read instead of the new ones."""
FACTS = ("data", "optim", "train", "corpus", "versions")
"""The sections of a run's config.json that are exported with the model."""


def export_run(path: str | Path, to: str | Path, step: int | None = None) -> Path:
    """Export a run's model at `step`, by default the last one, to the folder `to`, with its tokenizer and a model card.

    The folder appears complete or not at all. Raises ValueError if the run cannot be read or `to` is not empty.
    """
    run, to = RunFolder.open(path), Path(to)
    require_free(to)
    step = run.load_checkpoint(step, parts=()).step
    model, tokenizer = load_model(path, step)
    config = model.config
    # BOS ends documents too. It also pads texts, which is harmless because padding is masked.
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.bos)
    # A rule that needs the scores of earlier tokens, which are not cached, disables the cache.
    by_token = config.rule is None or config.rule.scope(training=False) == "token"
    generation = ids | ({} if by_token else {"use_cache": False})
    texts = {
        "config.json": to_json(_config(config, generation, _facts(run, step)), indent=2) + "\n",
        "generation_config.json": to_json(generation, indent=2) + "\n",
        "tokenizer_config.json": to_json(_tokenizer_config(config.context), indent=2) + "\n",
        f"{MODELING}.py": Path(__file__).with_name("transformers.py").read_text(encoding="utf-8"),
        **rule_files(config.rule),
        "README.md": model_card(run, config, step, to.name),
    }
    with new_folder(to) as temporary:
        for name, text in texts.items():
            write_synced(temporary / name, text.encode())
        tokenizer.save(temporary / "tokenizer.json")
        save_tensors(temporary / "model.safetensors", _outside(model.state_dict()), {"format": "pt"})
        for file in temporary.iterdir():
            file.chmod(0o644)
    return to


def import_folder(path: str | Path, out: str | Path) -> RunFolder:
    """Create a run folder from a model that `export_run` wrote, or that transformers saved after loading such a model.

    The run's checkpoint contains only weights, so the run can be used and can initialize others but not be resumed.
    Raises ValueError if the folder contains another kind of model, is incomplete, or is inconsistent.
    """
    path = Path(path)
    config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    if config.get("model_type") != MODEL_TYPE:
        raise ValueError(f"{path} has no config.json with model_type {MODEL_TYPE}; use a folder that et export wrote")
    _require_whole_model(path, config)
    if (softcap := config.get(SOFTCAP, GPTConfig.softcap)) != GPTConfig.softcap:
        raise ValueError(f"{path / 'config.json'}: {SOFTCAP}={softcap} must be {GPTConfig.softcap}, as in the export")
    options = {f.name: config[f.name] for f in fields(GPTConfig) if f.name in config and f.name != "rule"}
    tokenizer, weights = read_tokenizer(path / "tokenizer.json"), _inside(_load(path))
    _require_own_vocabulary(path, tokenizer.vocab_size, options.get("vocab_size"))
    options["vocab_size"] = tokenizer.vocab_size
    try:
        gpt_config = GPTConfig.from_dict({"model": options, "rule": config.get("rule")})
    except ValueError as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from error
    with torch.device("meta"):
        model = GPT(gpt_config)
    # Other programs may have changed dtypes (weights to half precision, counters to floats) or padded the vocabulary.
    for name, own in model.state_dict().items():
        if name in weights:
            rows = weights[name][: len(own)] if name == HEAD[0] or name.endswith("embed.weight") else weights[name]
            weights[name] = rows.to(own.dtype)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        reasons = str(error).split(":", 1)[1].split("\n\t")[1:]
        raise ValueError(f"{path}: the weights do not match config.json: {' '.join(reasons)[:200]}") from None
    facts, step = _exported_facts(path, config)
    with new_folder(out, "--out") as temporary:
        run = RunFolder(temporary)
        run.write_config(gpt_config.to_dict() | facts)
        tokenizer.save(run.tokenizer_path)
        run.save_checkpoint(step, {"model": model.state_dict()}, {"options": run.model_options()})
    return RunFolder.open(out)


def _exported_facts(path: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the sections and the step that `_facts` exported. Raises ValueError if they are damaged."""
    with corrupted_file_error(path / "config.json", "export the model again"):
        run = config.get("run") or {}
        step = run.get("step", 0)
        if type(step) is not int or step < 0:
            raise ValueError(f"the step of its run is {step!r}")
        facts = {name: dict(run[name]) for name in FACTS if name in run}
        to_json(facts)  # refuses NaN
        return facts, step


def _require_whole_model(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ValueError unless the folder contains the whole language model, unquantised and with its tokenizer."""
    saved, quantised = (config.get("architectures") or [ARCHITECTURE])[0], config.get("quantization_config")
    if saved != ARCHITECTURE:
        raise ValueError(f"{path} was saved as {saved}, which has no language-model head; save an AutoModelForCausalLM")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ValueError(f"{path}: the weights are quantised ({method}); import the unquantised model")
    if not (path / "tokenizer.json").is_file():
        raise ValueError(
            f"{path / 'tokenizer.json'} is missing; save the model's tokenizer there with "
            "tokenizer.save_pretrained, or copy the file from the folder that et export wrote"
        )


def _require_own_vocabulary(path: Path, tokens: int, rows: Any) -> None:
    """Raise ValueError unless the model's vocabulary is the run's `tokens`, possibly padded with unused rows."""
    added = [token["content"] for token in read_json(path / "tokenizer.json")["added_tokens"] if token["id"] >= tokens]
    if not isinstance(rows, int) or rows < tokens or (added and rows > tokens):
        what = f"the added tokens {', '.join(map(repr, added[:3]))}" if added else "a vocabulary of another size"
        raise ValueError(
            f"{path}: the model has {rows} tokens, but its run has {tokens}, and {what} cannot be imported; "
            f"save the model after resize_token_embeddings({tokens}) to import it"
        )


def _outside(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename our model's tensors as in an export, where the experts' gate and up projections are one tensor."""
    found = {HEAD[1] if name == HEAD[0] else PREFIX + name: tensor for name, tensor in weights.items()}
    for experts in [name.removesuffix("up") for name in found if name.endswith("experts.up")]:
        gate, up = found.pop(f"{experts}gate", None), found.pop(f"{experts}up")
        found[f"{experts}down_proj"] = found.pop(f"{experts}down")
        found |= {f"{experts}up_proj": up} if gate is None else {f"{experts}gate_up_proj": torch.cat((gate, up), 1)}
    return found


def _inside(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `_outside`."""
    found = {HEAD[0] if name == HEAD[1] else name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}
    for name in [name for name in found if name.endswith("_proj")]:
        tensor = found.pop(name)
        if name.endswith("gate_up_proj"):
            experts = name.removesuffix("gate_up_proj")
            found[f"{experts}gate"], found[f"{experts}up"] = (half.contiguous() for half in tensor.chunk(2, 1))
        else:
            found[name.removesuffix("_proj")] = tensor
    return found


def _load(path: Path) -> dict[str, Tensor]:
    """Load the weights from one file, or from the files listed in an index."""
    index = path / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        with corrupted_file_error(index, "export or save the model again"):
            files = set(map(str, read_json(index)["weight_map"].values()))
    weights: dict[str, Tensor] = {}
    for name in sorted(files):
        if Path(name).name != name:
            raise ValueError(f"{index} lists {name!r}, which is not a file in this folder")
        if not (path / name).is_file():
            raise ValueError(f"{path / name} is missing; export or save the model again")
        try:
            weights |= load_file(path / name)
        except SafetensorError as error:
            raise ValueError(f"{path / name} is damaged ({error}); export or save the model again") from None
    if odd := [name for name, tensor in weights.items() if tensor.is_complex()]:
        raise ValueError(f"{path}: {odd[0]} is complex, but weights must be real; export or save the model again")
    return weights


def _facts(run: RunFolder, step: int) -> dict[str, Any]:
    """Return the facts about a run to export. Its text is given by name, not path, since exports are shared."""
    config = run.config
    facts = {"step": step} | {name: config[name] for name in FACTS if name in config}
    with corrupted_file_error(run.path / "config.json", "restore it from a backup, or train again"):
        if "data" in facts:
            facts["data"] = facts["data"] | {"source": Path(facts["data"]["source"]).name}
        if "corpus" in facts:
            facts["corpus"] = facts["corpus"] | {"name": Path(facts["corpus"]["name"]).name}
    return facts


def _config(config: GPTConfig, generation: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    sections = config.to_dict()
    return {
        "architectures": [ARCHITECTURE],
        "auto_map": AUTO_MAP,
        "model_type": MODEL_TYPE,
        "dtype": "float32",
        SOFTCAP: GPTConfig.softcap,
        **sections["model"],
        "rule": sections["rule"],
        "tie_word_embeddings": False,
        **generation,
        "run": facts,
    }


def _tokenizer_config(context: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), BOS),
        "model_max_length": context,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }


def push(folder: Path, repository: str) -> str:
    """Upload an export and return its URL. If the repository does not exist, a private one is created."""
    with hub_errors(repository, "uploaded to") as hub:
        api = hub.HfApi()
        address = str(api.create_repo(repository, private=True, exist_ok=True))
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=f"Upload {folder.name}", delete_patterns=WEIGHTS
        )
    return address


def model_folder(name: str) -> Path:
    """Return the folder with this name, downloaded if the name is hub:OWNER/NAME."""
    if not name.startswith(HUB):
        return Path(name)
    repository = name.removeprefix(HUB)
    with hub_errors(repository) as hub:
        return Path(hub.snapshot_download(repository, allow_patterns=FILES))


def run_folder(name: str) -> str:
    """Return the run folder with this name. Each revision of hub:OWNER/NAME is imported into the cache once."""
    if not name.startswith(HUB):
        return name
    snapshot = model_folder(name)  # named after the commit
    run = cache_folder() / "runs" / name.removeprefix(HUB) / snapshot.name
    return str(run if run.exists() else import_folder(snapshot, run).path)

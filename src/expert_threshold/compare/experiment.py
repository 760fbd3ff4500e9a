"""Experiments of several runs: a folder whose record holds all options, which the same command continues later."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from rich.console import Console

from .. import __version__
from ..config import RunConfig
from ..data import Corpus, DataConfig, Tokenizer
from ..data.token_files import TOKENIZER
from ..files import corrupted_file_error, missing_folders, read_json, remove_empty, to_json
from ..routing import rule_to_dict
from ..runs.lock import LOCK, exclusive, is_vacant
from ..train import Text, read_text
from ..train.device import machine, pick_device, pick_dtype
from ..train.log import Display, Title, clock

VERSION = 1
_SECTIONS = ("train", "data", "model", "optim")
OTHER_FOLDER = "restore it from a copy, or name another --out"


class Kind(NamedTuple):
    """A kind of experiment: its name in errors, and the name of its record in the folder."""

    name: str
    file: str

    @property
    def format(self) -> str:
        """The record's format, as it says itself."""
        return f"expert-threshold {self.name}"


@contextmanager
def opened(out: str, kind: Kind) -> Iterator[Path]:
    """Make or find the folder of an experiment, and lock it for this process; a new folder left empty is removed.

    Raises ValueError if it exists and is not such an experiment.
    """
    folder = Path(out)
    begun = (folder / kind.file).is_file()
    if folder.exists() and not begun and not (folder.is_dir() and is_vacant(folder)):
        raise ValueError(f"--out {folder}: already exists and is not a {kind.name}; name another --out")
    missing = missing_folders(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with exclusive(folder / LOCK):
            yield folder
    finally:
        remove_empty(missing)


def require_format(record: Mapping[str, Any], kind: Kind, path: Path, remedy: str) -> None:
    """Raise ValueError unless the record read from `path` is of this kind, in the version that this program reads."""
    if record.get("format") != kind.format:
        raise ValueError(f"{path}: damaged, or not the record of a {kind.name}; {remedy}")
    if record.get("version") != VERSION:
        raise ValueError(
            f"{path}: written by another version of expert-threshold: format version {record.get('version')}, but this "
            f"program reads {VERSION}; {remedy}"
        )


def here(config: RunConfig) -> dict[str, Any]:
    """Return the machine and the versions that runs are made with now."""
    return machine(pick_device(config.train.device), config.train.threads) | {
        "expert_threshold": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _options(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return a run's options by section, but for its rule and seed, which experiments record by themselves."""
    sections = config.to_dict()
    del sections["model"]["rule"], sections["train"]["seed"]
    return {name: sections[name] for name in _SECTIONS}


def own_options(config: RunConfig, shared: RunConfig) -> dict[str, Any]:
    """Return the options, of any section, in which a run differs from what an experiment's runs share."""
    sections = zip(_options(config).values(), _options(shared).values(), strict=True)
    return {name: value for mine, usual in sections for name, value in mine.items() if value != usual[name]}


def read_record(
    out: Path,
    kind: Kind,
    start: Mapping[str, str],
    configs: Mapping[str, RunConfig],
    shared: RunConfig,
    own: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return all options of the experiment, as in its record. Raises ValueError if an existing record differs.

    shared: what the runs have in common; the record has the options in which a method differs as `own_options`. own:
    options of the experiment beside those of its runs. The record has one dtype for all runs, on whatever machine: with
    `auto`, that of the machine where the experiment began. Without an existing record, the corpus is None until
    `record_corpus`, and the machine is this one; with one, `record_machine` adds this one.
    """
    # Derived options come last, so that an error names the option that was typed.
    options = {"run": start} | _options(shared)
    if own:
        options = {"own": own} | options
    now: dict[str, Any] = json.loads(
        to_json(
            {
                "format": kind.format,
                "version": VERSION,
                "options": options,
                "methods": {name: rule_to_dict(config.model.rule) for name, config in configs.items()},
                "own_options": {name: own_options(config, shared) for name, config in configs.items()},
                "corpus": None,
                "machines": [here(shared)],
            }
        )
    )
    path, train = out / kind.file, now["options"]["train"]
    is_auto = train["dtype"] == "auto"
    if is_auto:
        train["dtype"] = str(pick_dtype("auto", pick_device(shared.train.device))).removeprefix("torch.")
    if not path.exists():
        return now
    before = read_json(path)
    require_format(before, kind, path, OTHER_FOLDER)
    with corrupted_file_error(path, OTHER_FOLDER):
        if is_auto:
            train["dtype"] = before["options"]["train"]["dtype"]
        known = now | {
            "methods": before["methods"] | now["methods"],
            "own_options": before["own_options"] | now["own_options"],
            "corpus": {name: before["corpus"][name] for name in ("name", "hash", "bytes", "tokenizer", "train_shards")},
            "machines": [{name: machine[name] for name in now["machines"][0]} for machine in before["machines"]],
        }
        usual = {option: value for section in _SECTIONS for option, value in now["options"][section].items()}
        pairs = [
            (option, section.get(option), (before["options"] | before["methods"]).get(name, section).get(option))
            for name, section in (now["options"] | now["methods"]).items()
            for option in section
        ] + [
            (option, *(record["own_options"][name].get(option, usual[option]) for record in (now, before)))
            for name in before["methods"].keys() & now["methods"].keys()
            for option in {**before["own_options"][name], **now["own_options"][name]}
        ]
    for option, value, was in pairs:
        if value != was:
            raise ValueError(
                f"{option}={value!r} differs from {was!r}, with which {out} began; keep the old value, "
                "or name another --out"
            )
    return known


def record_machine(record: dict[str, Any], shared: RunConfig) -> None:
    """Add this machine, with the versions here, to the record as one that makes runs."""
    now = json.loads(to_json(here(shared)))
    if now not in record["machines"]:
        record["machines"].append(now)


def record_corpus(record: dict[str, Any], corpus: Corpus, out: Path, tokenizer: Tokenizer | None = None) -> None:
    """Add the corpus, and its tokenizer once known, to the record. Raises ValueError if the record has another."""
    before = record["corpus"] or {"hash": corpus.hash, "tokenizer": None}
    if before["hash"] != corpus.hash:
        raise ValueError(f"{corpus.name} has changed since {out} began; restore the text, or name another --out")
    known = before["tokenizer"]
    found = known if tokenizer is None else tokenizer.hash
    if known not in (None, found):
        raise ValueError(
            f"the tokenizer of {corpus.name} has changed since {out} began; restore {TOKENIZER}, or name another --out"
        )
    record["corpus"] = {
        "name": corpus.name,
        "hash": corpus.hash,
        "bytes": corpus.bytes,
        "tokenizer": found,
        "train_shards": corpus.train_shards,
    }


def with_recorded_shards(record: Mapping[str, Any], data: DataConfig) -> DataConfig:
    """Return the data options limited to the shards the experiment began with, since more may have been downloaded."""
    known = (record["corpus"] or {}).get("train_shards")
    return replace(data, train_shards=known) if data.train_shards is None else data


def read_shared_text(record: dict[str, Any], config: RunConfig, out: Path, console: Console) -> Text:
    """Return the text of all new runs, and record it. Raises ValueError if it cannot be read, or as `record_corpus`."""
    with Display(console) as display:
        text = read_text(config.model, config.data, config.train, display)
    record_corpus(record, text.corpus, out, text.tokenizer)
    return text


def run_title(label: str, start: float, seconds: Sequence[float], later: int) -> Title:
    """Return the opening of a run's progress lines. seconds: of earlier runs; later: the number of runs to follow."""

    def title(left: float | None) -> str:
        if left is None:
            return label
        total = time.monotonic() - start + left
        return f"{label} ({clock(left + later * mean([*seconds, total]))} left in all)"

    return title

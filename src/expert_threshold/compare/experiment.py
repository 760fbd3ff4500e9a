"""Experiments: several runs in one folder. One process uses it at a time, and the same command continues it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from rich.console import Console

from ..config import RunConfig
from ..data.tokens import TOKENIZER
from ..files import missing_folders, remove_empty, to_json
from ..runs.lock import LOCK, exclusive, is_vacant
from ..train import Text, read_text
from ..train.device import pick_device, pick_dtype
from ..train.log import Display, Title, clock

OTHER_FOLDER = "restore it from a backup, or use another --out"
OF_MACHINE = {"seed", "device", "threads", "train_shards"}
"""The seed, and options that config.json stores in resolved form. Runs of one method may differ in these options."""


class KnownText(NamedTuple):
    """The text of earlier runs: the hashes of its corpus and tokenizer, and its number of shards, which may grow."""

    corpus: str
    tokenizer: str
    train_shards: int | None


@contextmanager
def opened(out: str, what: str, file: str) -> Iterator[Path]:
    """Create or open the folder of an experiment and lock it for this process. A new folder left empty is removed.

    what: the kind of experiment. file: the name of its record. Raises ValueError if a used folder lacks the record.
    """
    folder = Path(out)
    started = (folder / file).is_file()
    if folder.exists() and not started and not (folder.is_dir() and is_vacant(folder)):
        raise ValueError(f"--out {folder} already exists and is not a {what}; use another --out")
    missing = missing_folders(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with exclusive(folder / LOCK):
            yield folder
    finally:
        remove_empty(missing)


def options_by_path(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a config.json as JSON values, keyed by path, without `OF_MACHINE`.

    Derived options come last, so that an error names the option that the user typed.
    """
    options = {
        f"{section}.{name}": value
        for section in ("train", "data", "model", "optim", "rule")
        for name, value in sections[section].items()
        if name not in OF_MACHINE
    }
    read: dict[str, Any] = json.loads(to_json(options))
    return read


def require_same(now: Mapping[str, Any], before: Mapping[str, Any], out: Path) -> None:
    """Raise ValueError naming an option whose value differs from the value that the experiment was started with."""
    for name, value in now.items():
        if value != before.get(name):
            raise ValueError(
                f"{name}={value!r} differs from {before.get(name)!r}, which {out} was started with; "
                "keep the old value, or use another --out"
            )


def with_dtype(config: RunConfig, before: str | None) -> RunConfig:
    """Return the configuration with dtype `auto` replaced by the dtype of earlier runs, or else of this machine."""
    train = config.train
    if train.dtype != "auto":
        return config
    dtype: Any = before or str(pick_dtype("auto", pick_device(train.device))).removeprefix("torch.")
    return replace(config, train=replace(train, dtype=dtype))


def with_shards(config: RunConfig, known: KnownText | None) -> RunConfig:
    """Return the configuration limited to the shards of earlier runs, since more may have been downloaded since."""
    if known is None or config.data.train_shards is not None:
        return config
    return replace(config, data=replace(config.data, train_shards=known.train_shards))


def read_shared_text(config: RunConfig, known: KnownText | None, out: Path, console: Console) -> Text:
    """Return the text that all new runs share. Raises ValueError if it is unreadable or not as before."""
    with Display(console) as display:
        text = read_text(config.model, with_shards(config, known).data, config.train, display)
    name = text.corpus.name
    if known is not None and text.corpus.hash != known.corpus:
        raise ValueError(f"{name} has changed since {out} was started; restore the text, or use another --out")
    if known is not None and text.tokenizer.hash != known.tokenizer:
        raise ValueError(
            f"the tokenizer of {name} has changed since {out} was started; restore {TOKENIZER}, or use another --out"
        )
    return text


def run_title(label: str, start: float, seconds: Sequence[float], later: int) -> Title:
    """Return the prefix of a run's progress lines. seconds: durations of earlier runs. later: number of later runs."""

    def title(left: float | None) -> str:
        if left is None:
            return label
        total = time.monotonic() - start + left
        return f"{label} ({clock(left + later * mean([*seconds, total]))} left in all)"

    return title

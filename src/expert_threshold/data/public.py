"""Public data sets: their addresses and their places in the cache folder."""

from __future__ import annotations

import os
import shutil
import zipfile
import zlib
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from .cache import VARIABLE, cache_folder, require_writable
from .download import Progress, download, fetch, list_files
from .files import SUFFIXES, kind

FINEWEB_EDU = "fineweb-edu"
FINEWEB_EDU_DATASET = "karpathy/fineweb-edu-100b-shuffle"
FINEWEB_EDU_SHARDS = 1823
"""The number of shards; the last one is the validation split, however many others are downloaded."""

HUB = "hub"
"""The folder of other data sets of the Hugging Face hub."""

CORE = "core"
CORE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
CORE_FOLDER = "eval_bundle"
"""The bundle's folder in the archive."""
MOST_BYTES = 2 << 30
"""Unpacked, the bundle has a tenth of it; a damaged or hostile archive could fill the disk."""


def fineweb_edu_shards(cache: Path, shards: int) -> list[Path]:
    """Return the paths of the first `shards` for training and of the one for validation."""
    numbers = [*range(shards), FINEWEB_EDU_SHARDS - 1]
    return [cache / FINEWEB_EDU / f"shard_{number:05}.parquet" for number in numbers]


def fetch_dataset(cache: Path, name: str, pattern: str, progress: Progress) -> Path:
    """Download the files of text of a data set on the Hugging Face hub whose paths match; return their folder.

    Parquet is preferred to JSON lines, and these to plain text. Raises ValueError as `download` does.
    """
    matching = [path for path in list_files(name) if fnmatch(path, pattern)]
    names = next((found for suffix in SUFFIXES if (found := [n for n in matching if kind(Path(n)) == suffix])), None)
    if names is None:
        raise ValueError(f"{name} has no .parquet, .jsonl or .txt file that matches {pattern}; look at its page")
    folder = require_writable(cache / HUB / name)
    download(name, names, folder, progress)
    return folder


def fetch_fineweb_edu(cache: Path, shards: int, progress: Progress) -> list[Path]:
    """Download the missing training shards and the validation split. Raises ValueError as `download` does."""
    if not 1 <= shards < FINEWEB_EDU_SHARDS:
        raise ValueError(
            f"--shards {shards}: there are {FINEWEB_EDU_SHARDS - 1} for training; give from 1 to that many"
        )
    paths = fineweb_edu_shards(cache, shards)
    folder = require_writable(cache / FINEWEB_EDU)
    download(FINEWEB_EDU_DATASET, [path.name for path in paths], folder, progress)
    return paths


def downloaded_fineweb_edu() -> list[Path]:
    """Return the shards in the user's cache, the last one for validation. Raises ValueError if there are none."""
    folder = cache_folder() / FINEWEB_EDU
    paths = sorted(folder.glob("shard_*.parquet"))
    if len(paths) < 2 or paths[-1] != fineweb_edu_shards(cache_folder(), 1)[-1]:
        raise ValueError(
            f"{FINEWEB_EDU} is not in {folder}: download it with et data {FINEWEB_EDU} --shards N, or name another "
            f"cache folder in {VARIABLE}"
        )
    return paths


def fetch_core(cache: Path, progress: Progress) -> Path:
    """Download and unpack the CORE eval bundle, unless it is there. Raises ValueError as `fetch` does."""
    bundle = require_writable(cache) / CORE
    if not bundle.exists():
        archive = cache / Path(CORE_URL).name
        if not archive.exists():
            fetch(CORE_URL, archive, progress)
        unzip(archive, bundle, CORE_FOLDER)
        archive.unlink()
    return bundle


def core_bundle() -> Path | None:
    """Return the folder of the eval bundle in the user's cache; None if it was not downloaded."""
    with suppress(ValueError):  # no home folder
        if (bundle := cache_folder() / CORE).is_dir():
            return bundle
    return None


def unzip(archive: Path, folder: Path, top: str) -> None:
    """Unpack the archive's folder `top` as `folder`, atomically. Raises ValueError if it is damaged or has no `top`."""
    temporary = folder.with_name(f".part-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as file:
            if sum(member.file_size for member in file.infolist()) > MOST_BYTES:
                raise ValueError(f"it would unpack into more than {MOST_BYTES >> 30} GiB")
            file.extractall(temporary)  # checks contents, stays inside the folder and makes no links
        if not (temporary / top).is_dir():
            raise ValueError(f"it has no folder {top}")
    except (ValueError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{archive} cannot be unpacked ({error}): delete it and download it again") from None
    os.replace(temporary / top, folder)
    shutil.rmtree(temporary)

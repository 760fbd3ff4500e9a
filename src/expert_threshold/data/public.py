"""Downloads public data sets into the cache folder and finds them there later.

Data sets come from the Hugging Face hub, the CORE bundle from another server. Only complete files get their final name.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..files import expand, new_folder, replacing
from ..install import install
from .files import SUFFIXES, kind

VARIABLE = "EXPERT_THRESHOLD_CACHE"
TIMEOUT = 30.0  # seconds without receiving a byte

Progress = Callable[[int, int], None]
"""Called with the number of bytes received so far and the total."""

FINEWEB_EDU = "fineweb-edu"
FINEWEB_EDU_DATASET = "karpathy/fineweb-edu-100b-shuffle"
FINEWEB_EDU_SHARDS = 1823
"""The number of shards. The last one is the validation split, however many of the others are downloaded."""
_FINEWEB_EDU_SHARD = "shard_{:05}.parquet"

HUB = "hub"
"""The subfolder for other data sets from the Hugging Face hub."""

CORE = "core"
CORE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
CORE_FOLDER = "eval_bundle"
"""The bundle's folder in the archive."""
MOST_BYTES = 2 << 30
"""The maximum number of bytes to unpack, ten times the bundle's size. A hostile archive could fill the disk."""


def cache_folder() -> Path:
    """Return the folder named in EXPERT_THRESHOLD_CACHE, by default `expert-threshold` in the user's cache folder.

    Raises ValueError if the path starts with ~ and there is no home folder.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = expand(os.environ.get(VARIABLE) or f"{caches}/expert-threshold")
    if str(folder).startswith("~"):
        raise ValueError(f"the cache {folder} requires a home folder; set {VARIABLE} to another cache folder")
    return folder.absolute()


def require_writable(folder: Path, remedy: str = f"set {VARIABLE} to another cache folder") -> Path:
    """Create the folder if needed and return it. Raises ValueError with the remedy if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"folder {folder} is not writable ({error.strerror}): {remedy}") from None
    return folder


def list_files(dataset: str) -> dict[str, Any]:
    """Return the hub's records of the files of a data set, keyed by path. Raises ValueError as `download` does."""
    with hub_errors(dataset) as hub:
        entries = hub.HfApi().list_repo_tree(dataset, recursive=True, repo_type="dataset")
        return {entry.path: entry for entry in entries if hasattr(entry, "size")}  # folders have no size


def download(dataset: str, names: Sequence[str], folder: Path, progress: Progress = lambda done, total: None) -> None:
    """Download the named files of a data set that are missing from a folder and check their SHA-256.

    Interrupted downloads are resumed. After a failure, completed files are kept, and the next call continues from
    there. Raises ValueError if the hub is unreachable or refuses a file, or if huggingface_hub is missing, and OSError
    if the disk is full.
    """
    missing = [name for name in names if not (folder / name).exists()]
    if not missing:
        return
    listed = list_files(dataset)
    if absent := [name for name in missing if name not in listed]:
        raise ValueError(f"{dataset} has no file {absent[0]} on the Hugging Face hub; check the name")
    done, total = 0, max(sum(listed[name].size for name in missing), 1)
    incomplete = folder / ".incomplete"
    for name in missing:
        with hub_errors(dataset) as hub:
            how = {"repo_type": "dataset", "local_dir": incomplete, "tqdm_class": _bar(hub, progress, done, total)}
            part = Path(hub.HfApi().hf_hub_download(dataset, name, **how))
        if listed[name].lfs:  # the hub records no SHA-256 of small files
            _require_sha256(part, dataset, listed[name].lfs.sha256)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, folder / name)
        done += listed[name].size
        progress(done, total)
    shutil.rmtree(incomplete)


def _bar(hub: Any, progress: Progress, done: int, total: int) -> type:
    """Return a progress bar class that draws nothing, but reports `done` plus the bytes it has received."""

    class Bar(hub.utils.tqdm):
        arrived = 0

        def update(self, n: float | None = 1) -> None:
            self.arrived += int(n or 0)
            progress(min(done + self.arrived, total), total)

        def display(self, *_: object, **__: object) -> None:
            pass

    return Bar


def _require_sha256(part: Path, dataset: str, sha256: str) -> None:
    """Remove the file and raise ValueError if its SHA-256 is not `sha256`."""
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        part.unlink()
        raise ValueError(
            f"{dataset}: {part.name} arrived with sha256 {found[:12]}…, but the hub lists {sha256[:12]}…; try again"
        )


@contextmanager
def hub_errors(name: str, what: str = "downloaded from") -> Iterator[Any]:
    """Yield the module huggingface_hub and convert its errors, which share no base class, to ValueError."""
    try:
        import huggingface_hub as hub
        import huggingface_hub.utils
    except ImportError:
        raise ValueError(f"access to the Hugging Face hub needs huggingface_hub: {install('hub')}") from None
    try:
        yield hub
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(
            f"{name} cannot be {what} the Hugging Face hub ({reason}); check the name and the network, and try again; "
            "private and gated repositories need your token in HF_TOKEN"
        ) from error


def fetch(url: str, path: Path, progress: Progress = lambda done, total: None) -> None:
    """Download one file. Raises ValueError if the server is unreachable, refuses the request or sends too few bytes."""
    try:
        with replacing(path) as part, urllib.request.urlopen(url, timeout=TIMEOUT) as response, part.open("wb") as file:
            if url.startswith("https:") and not response.url.startswith("https:"):
                raise http.client.HTTPException(f"it redirects to {response.url}, which is not https")
            if (size := int(response.headers.get("Content-Length", 0))) == 0:
                raise http.client.HTTPException("the server does not report its size")
            while chunk := response.read(1 << 20):
                file.write(chunk)
                progress(file.tell(), size)
            if file.tell() != size:
                raise http.client.HTTPException(f"{file.tell()} bytes arrived instead of {size}")
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = getattr(error, "reason", error)
        raise ValueError(
            f"{url} cannot be downloaded ({reason}); check the network and try again, or put the file in {path.parent}"
        ) from None


def fetch_dataset(cache: Path, name: str, pattern: str, progress: Progress) -> Path:
    """Download the files of a Hugging Face data set whose paths match `pattern`, and return their folder.

    Only files of one kind are downloaded: Parquet if there are any, else JSON Lines, else plain text. Raises ValueError
    as `download` does.
    """
    matching = [path for path in list_files(name) if fnmatch(path, pattern)]
    names = next((found for suffix in SUFFIXES if (found := [n for n in matching if kind(Path(n)) == suffix])), None)
    if names is None:
        raise ValueError(f"{name} has no .parquet, .jsonl or .txt file that matches {pattern}; see its page on the hub")
    folder = require_writable(cache / HUB / name)
    download(name, names, folder, progress)
    return folder


def fetch_fineweb_edu(cache: Path, shards: int, progress: Progress) -> list[Path]:
    """Download the missing training shards and the validation split. Raises ValueError as `download` does."""
    last = FINEWEB_EDU_SHARDS - 1
    if not 1 <= shards <= last:
        raise ValueError(f"--shards {shards} must be a number from 1 to {last}, the number of training shards")
    names = [_FINEWEB_EDU_SHARD.format(number) for number in (*range(shards), last)]
    folder = require_writable(cache / FINEWEB_EDU)
    download(FINEWEB_EDU_DATASET, names, folder, progress)
    return [folder / name for name in names]


def downloaded_fineweb_edu() -> list[Path]:
    """Return the shards in the user's cache, the last of which is for validation. Raises ValueError if none exist."""
    folder = cache_folder() / FINEWEB_EDU
    paths = sorted(folder.glob("shard_*.parquet"))
    if len(paths) < 2 or paths[-1].name != _FINEWEB_EDU_SHARD.format(FINEWEB_EDU_SHARDS - 1):
        raise ValueError(
            f"{FINEWEB_EDU} is not in {folder}; download it with et data {FINEWEB_EDU} --shards N, or set "
            f"{VARIABLE} to another cache folder"
        )
    return paths


def fetch_core(cache: Path, progress: Progress) -> Path:
    """Download and unpack the CORE eval bundle unless it is already there. Raises ValueError as `fetch` does."""
    bundle = require_writable(cache) / CORE
    if not bundle.exists():
        archive = cache / Path(CORE_URL).name
        if not archive.exists():
            fetch(CORE_URL, archive, progress)
        unzip(archive, bundle, CORE_FOLDER)
        archive.unlink()
    return bundle


def core_bundle() -> Path | None:
    """Return the folder of the eval bundle in the user's cache, or None if it has not been downloaded."""
    with suppress(ValueError):  # no home folder
        if (bundle := cache_folder() / CORE).is_dir():
            return bundle
    return None


def unzip(archive: Path, folder: Path, top: str) -> None:
    """Unpack an archive's folder `top` to `folder` atomically. Raises ValueError if it is damaged or lacks `top`."""
    try:
        with zipfile.ZipFile(archive) as file, new_folder(folder) as temporary:
            members = [member for member in file.infolist() if member.filename.startswith(f"{top}/")]
            if not members:
                raise ValueError(f"it has no folder {top}")
            if sum(member.file_size for member in members) > MOST_BYTES:
                raise ValueError(f"it would unpack into more than {MOST_BYTES >> 30} GiB")
            for member in members:
                member.filename = member.filename.removeprefix(f"{top}/")
                if member.filename:
                    file.extract(member, temporary)  # checks the content and stays inside the folder
    except (ValueError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{archive} cannot be unpacked ({error}); delete it and download it again") from None

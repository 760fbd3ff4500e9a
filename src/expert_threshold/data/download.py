"""Downloads: files of data sets on the Hugging Face hub, and single files, put in place only when complete."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..install import install

TIMEOUT = 30.0  # seconds without a byte

Progress = Callable[[int, int], None]
"""Receives the bytes present and the total."""


class Remote(NamedTuple):
    """A file of a data set. The hub knows the SHA-256 of large files, None for small ones."""

    size: int
    sha256: str | None


def list_files(dataset: str) -> dict[str, Remote]:
    """Return the files of a data set, by path. Raises ValueError as `download` does."""
    with _hub_errors(dataset) as hub:
        entries = hub.HfApi().list_repo_tree(dataset, recursive=True, repo_type="dataset")
        files = [entry for entry in entries if hasattr(entry, "size")]  # the others are folders
    return {file.path: Remote(file.size, file.lfs.sha256 if file.lfs else None) for file in files}


def download(dataset: str, names: Sequence[str], folder: Path, progress: Progress = lambda done, total: None) -> None:
    """Download the missing ones of these files of a data set into a folder, and check their SHA-256.

    Broken connections are resumed. Complete files stay if a later one fails, so that the next call goes on from there.
    Raises ValueError if the hub is unreachable, refuses a file, or huggingface_hub is missing; OSError if the disk is
    full.
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
        with _hub_errors(dataset) as hub:
            bar = _bar(hub, progress, done, total)
            part = Path(
                hub.HfApi().hf_hub_download(dataset, name, repo_type="dataset", local_dir=incomplete, tqdm_class=bar)
            )
        _check(part, dataset, listed[name].sha256)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, folder / name)
        done += listed[name].size
        progress(done, total)
    shutil.rmtree(incomplete)


def _bar(hub: Any, progress: Progress, done: int, total: int) -> type:
    """Return a progress bar that draws nothing but reports the bytes that arrived after those `done`."""

    class Bar(hub.utils.tqdm):
        arrived = 0

        def update(self, n: float | None = 1) -> None:
            self.arrived += int(n or 0)
            progress(min(done + self.arrived, total), total)

        def display(self, *_: object, **__: object) -> None:
            pass

    return Bar


def _check(part: Path, dataset: str, sha256: str | None) -> None:
    """Remove a file that is not what the hub has. Raises ValueError about it."""
    if sha256 is None:
        return
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        part.unlink()
        raise ValueError(
            f"{dataset}: {part.name} arrived with sha256 {found[:12]}…, the hub states {sha256[:12]}…; try again"
        )


@contextmanager
def _hub_errors(dataset: str) -> Iterator[Any]:
    """Yield huggingface_hub, and turn its errors, which have no base of their own, into a ValueError."""
    try:
        import huggingface_hub as hub
        import huggingface_hub.utils
    except ImportError:
        raise ValueError(f"downloads from the Hugging Face hub need huggingface_hub: {install('hub')}") from None
    try:
        yield hub
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(
            f"{dataset} cannot be downloaded from the Hugging Face hub ({reason}): check its name and the network, and "
            "try again; a data set that asks for consent needs your token in HF_TOKEN"
        ) from error


class _Encrypted(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but not from https to http."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if req.type == "https" and not newurl.startswith("https://"):
            raise http.client.HTTPException(f"it redirects to {newurl}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch(url: str, path: Path, progress: Progress = lambda done, total: None) -> None:
    """Download one file. Raises ValueError if the server is unreachable, refuses it, or ends early."""
    part = path.with_name(f".part-{path.name}")
    try:
        opener = urllib.request.build_opener(_Encrypted)
        with opener.open(url, timeout=TIMEOUT) as response, part.open("wb") as file:
            if (size := int(response.headers.get("Content-Length", 0))) == 0:
                raise http.client.HTTPException("the server does not state its size")
            while chunk := response.read(1 << 20):
                file.write(chunk)
                progress(file.tell(), size)
        if (arrived := part.stat().st_size) != size:
            raise http.client.HTTPException(f"{arrived} bytes arrived instead of {size}")
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = getattr(error, "reason", error)
        raise ValueError(
            f"{url} cannot be downloaded ({reason}): check the network and try again, or put it in {path.parent}"
        ) from None
    os.replace(part, path)

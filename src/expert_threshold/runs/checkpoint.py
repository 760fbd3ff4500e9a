"""Checkpoints: a folder of safetensors files and JSON, whole or absent, with the hash of every byte in a manifest.

    step_000100/
      manifest.json           format, version, step; size and sha256 of every other file; written last
      state.json              whatever is no tensor
      model.safetensors       one file per part: {name: tensor}
      optimizer.safetensors
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .files import read_json, sync_folder, to_json, write_synced

FORMAT = "expert-threshold checkpoint"
VERSION = 1
_TEMPORARY = ".tmp-"
_FILE_NAME = re.compile(r"state\.json|[a-z0-9_]+\.safetensors")
_FOLDER_NAME = re.compile(r"step_(\d{6,})")


class Checkpoint(NamedTuple):
    step: int
    tensors: dict[str, dict[str, Tensor]]  # part -> name -> tensor, on the CPU
    state: dict[str, Any]


def folder_of(parent: Path, step: int) -> Path:
    return parent / f"step_{step:06d}"


def saved_steps(parent: Path) -> list[int]:
    """The steps in ascending order. Half-written checkpoints never have a step's name."""
    if not parent.is_dir():
        return []
    matches = [_FOLDER_NAME.fullmatch(entry.name) for entry in parent.iterdir() if entry.is_dir()]
    return sorted(int(match[1]) for match in matches if match)


def write(parent: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Saves a checkpoint so that at any time, also when killed, it is there whole or not at all.

    A step that is already there whole stays as it is: a run has one state per step. `OSError` (a full disk) and every
    other exception leave all earlier checkpoints as they were.
    """
    if not parent.exists():
        parent.mkdir()
        sync_folder(parent.parent)
    for leftover in parent.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(leftover)
    target = folder_of(parent, step)
    if target.exists():
        try:
            verify(target)
            return
        except ValueError:
            shutil.rmtree(target)
    temporary = parent / f"{_TEMPORARY}{target.name}"
    try:
        temporary.mkdir()
        write_synced(temporary / "state.json", to_json(state, indent=1).encode())
        for part, named in tensors.items():
            assert _FILE_NAME.fullmatch(f"{part}.safetensors"), part
            _write_tensors(temporary / f"{part}.safetensors", named)
            # safetensors makes files that their owner alone can read.
            shutil.copymode(temporary / "state.json", temporary / f"{part}.safetensors")
        files = {path.name: _fingerprint(path) for path in sorted(temporary.iterdir())}
        manifest = {"format": FORMAT, "version": VERSION, "step": step, "files": files}
        write_synced(temporary / "manifest.json", to_json(manifest, indent=1).encode())
        sync_folder(temporary)
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(parent)


def prune(parent: Path, keep: int, newest: int) -> None:
    """Removes all but the last `keep` checkpoints, and never `newest`, the one that is known to be whole."""
    for step in saved_steps(parent)[:-keep]:
        if step != newest:
            folder = folder_of(parent, step)
            doomed = parent / f"{_TEMPORARY}{folder.name}"  # so that no half-removed checkpoint has a step's name
            os.replace(folder, doomed)
            shutil.rmtree(doomed)


def read(parent: Path, step: int, parts: Collection[str] | None = None) -> Checkpoint:
    """Loads the checkpoint of `step` (of its tensors only `parts`, if given), after comparing every byte of what it
    loads with the manifest. Nothing is unpickled.

    Raises `ValueError` that names what is damaged, missing or foreign, and the checkpoint to fall back on.
    """
    folder = folder_of(parent, step)
    try:
        names = [name for name in _listed(folder) if parts is None or name.removesuffix(".safetensors") in parts]
        missing = set(parts or ()) - {name.removesuffix(".safetensors") for name in names}
        if missing:
            raise ValueError(f"{folder}: holds no {', '.join(sorted(missing))}")
        verify(folder, {*names, "state.json"})
        state = read_json(folder / "state.json")
        tensors = {
            name.removesuffix(".safetensors"): load_file(folder / name) for name in names if name != "state.json"
        }
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{error}; {_remedy(parent, step)}") from error
    return Checkpoint(step, tensors, state)


def verify(folder: Path, names: Collection[str] | None = None) -> None:
    """Compares the files (all, or those named) with the manifest: `ValueError` on the first difference."""
    for name, expected in _listed(folder).items():
        if names is not None and name not in names:
            continue
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path}: the file is missing")
        found = _fingerprint(path, expected["size"])
        if found != expected:
            what = "size" if found["size"] != expected["size"] else "sha256"
            raise ValueError(f"{path}: damaged: its {what} is not the manifest's")


def _listed(folder: Path) -> dict[str, dict[str, Any]]:
    """The files of a checkpoint with size and hash, from a manifest that is checked to be one of ours."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise ValueError(f"{path}: the file is missing")
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path}: not a checkpoint of expert-threshold, or damaged")
    if manifest.get("version") != VERSION:
        raise ValueError(f"{path}: format version {manifest.get('version')}, but this program reads {VERSION}")
    files = manifest.get("files")
    if not isinstance(files, dict) or "state.json" not in files or manifest.get("step") != int(folder.name[5:]):
        raise ValueError(f"{path}: damaged")
    for name, fingerprint in files.items():
        # Also refuses names that lead out of the folder.
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"{path}: lists {name!r}, which is no file of a checkpoint")
        if not isinstance(fingerprint, dict) or fingerprint.keys() != {"size", "sha256"}:
            raise ValueError(f"{path}: damaged")
    return files


def _remedy(parent: Path, step: int) -> str:
    for earlier in reversed([saved for saved in saved_steps(parent) if saved < step]):
        try:
            verify(folder_of(parent, earlier))
        except ValueError:
            continue
        return f"remove {folder_of(parent, step)} to fall back on {folder_of(parent, earlier).name}, which is whole"
    return "no earlier checkpoint is whole: restore this one from a copy, or train again with another --out"


def _write_tensors(path: Path, named: Mapping[str, Tensor]) -> None:
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}, path)
    except SafetensorError as error:  # how safetensors reports a full disk
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise OSError(f"{path}: {error}") from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _fingerprint(path: Path, size: int | None = None) -> dict[str, Any]:
    """Size and hash; the hash is left empty when the size is not the expected one, and need not be known."""
    found = path.stat().st_size
    if size not in (None, found):
        return {"size": found, "sha256": ""}
    with path.open("rb") as file:
        return {"size": found, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

"""Reads and writes checkpoints atomically: folders of safetensors and JSON files, with a manifest of their hashes.

    step_000100/
      manifest.json           format, version and step; size and sha256 of every other file; written last
      state.json              everything that is not a tensor
      model.safetensors       one file per part: {name: tensor}
      optimizer.safetensors

If there are several ranks, each writes its own files, such as `model_of_rank_0.safetensors`. They contain whole tensors
or slices along the first dimension, whose positions are in the metadata. Slices that overlap or leave gaps are
rejected. Readers get whole tensors, so any number of ranks can resume.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..files import TEMPORARY, named, read_json, sync_folder, to_json, write_synced

FORMAT = "expert-threshold checkpoint"
VERSION = 1
_FILE_NAME = re.compile(r"state\.json|[a-z0-9_]+\.safetensors")
_OF_RANK = re.compile(r"(_of_rank_\d+)?\.safetensors$")
_PLACES = "places"
_FOLDER_NAME = re.compile(r"step_(\d{6,})")


class Part(NamedTuple):
    """A slice of a tensor along the first dimension, starting at index `start`."""

    tensor: Tensor
    start: int
    shape: tuple[int, ...]  # shape of the whole tensor


Tensors = Mapping[str, Mapping[str, Tensor | Part]]
"""The tensors of a checkpoint, keyed by part and then by name. They may be the slices of one rank."""
Fingerprints = dict[str, dict[str, Any]]
"""The size and sha256 of each file, keyed by file name."""


class Checkpoint(NamedTuple):
    step: int
    tensors: dict[str, Any]  # keyed by part and then by name; on the CPU if read from disk
    state: dict[str, Any]


def folder_of(parent: Path, step: int) -> Path:
    return parent / f"step_{step:06d}"


def saved_steps(parent: Path) -> list[int]:
    """Return the saved steps in ascending order, including checkpoints that are links to another disk.

    An incomplete checkpoint never has the name of a step. Raises ValueError if `parent` is a dangling link.
    """
    entries = parent.iterdir() if _is_there(parent) else ()
    matches = [_FOLDER_NAME.fullmatch(entry.name) for entry in entries if entry.is_dir() or entry.is_symlink()]
    return sorted(int(match[1]) for match in matches if match)


def _is_there(parent: Path) -> bool:
    """Return True if the folder exists. Raises ValueError if it is a dangling link, such as to a missing disk."""
    if parent.is_symlink() and not parent.exists():
        raise ValueError(
            f"{parent} is a link to {os.readlink(parent)}, which does not exist; reconnect that disk, or remove the "
            "link to continue without these checkpoints"
        )
    return parent.exists()


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, but not a link's target, which may not belong to the run."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write(parent: Path, step: int, tensors: Tensors, state: Mapping[str, Any], keep: int | None = None) -> None:
    """Save a checkpoint atomically. Even if the process is killed, it is either complete or does not exist.

    Do nothing if the step is already saved, since a run has only one state per step. Any exception, such as an OSError
    for a full disk, leaves all earlier checkpoints intact. keep: as in `commit`.
    """
    temporary = begin(parent, step)
    if temporary is None:
        return
    try:
        commit(parent, step, write_files(temporary, tensors), state, keep)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def begin(parent: Path, step: int) -> Path | None:
    """Return an empty folder for a checkpoint's files, or None if the step is already saved.

    Checkpoints that were never committed are removed, and so is a damaged one of this step.
    """
    if not _is_there(parent):
        parent.mkdir()
        sync_folder(parent.parent)
    for leftover in parent.glob(f"{TEMPORARY}*"):
        _remove(leftover)
    target = folder_of(parent, step)
    if os.path.lexists(target):
        try:
            verify(target)
            return None
        except ValueError:
            _remove(target)
    temporary = _temporary(parent, step)
    temporary.mkdir()
    return temporary


def write_files(temporary: Path, tensors: Tensors, rank: int | None = None) -> Fingerprints:
    """Write one file per part, from any thread. rank: this rank, or None if only one process writes to the folder."""
    suffix = "" if rank is None else f"_of_rank_{rank}"
    files = {f"{part}{suffix}.safetensors": content for part, content in tensors.items()}
    assert all(map(_FILE_NAME.fullmatch, files)), files.keys()
    for name, content in files.items():
        _write_tensors(temporary / name, content)
    return {name: _fingerprint(temporary / name) for name in sorted(files)}


def commit(parent: Path, step: int, files: Fingerprints, state: Mapping[str, Any], keep: int | None = None) -> None:
    """Turn the files that all ranks have written into the checkpoint of `step`. files: their fingerprints.

    keep: number of newest checkpoints to keep, or None to keep all. The checkpoint of `step` and the targets of links
    are always kept.
    """
    temporary = _temporary(parent, step)
    write_synced(temporary / "state.json", to_json(state, indent=1).encode())
    for name in files:  # safetensors makes files readable only by their owner
        shutil.copymode(temporary / "state.json", temporary / name)
    files = {**files, "state.json": _fingerprint(temporary / "state.json")}
    manifest = {"format": FORMAT, "version": VERSION, "step": step, "files": dict(sorted(files.items()))}
    write_synced(temporary / "manifest.json", to_json(manifest, indent=1).encode())
    sync_folder(temporary)
    os.replace(temporary, folder_of(parent, step))
    sync_folder(parent)
    for earlier in saved_steps(parent)[:-keep] if keep is not None else ():
        if earlier != step:
            doomed = _temporary(parent, earlier)  # a partly removed checkpoint must never have the name of a step
            os.replace(folder_of(parent, earlier), doomed)
            _remove(doomed)


def _temporary(parent: Path, step: int) -> Path:
    return parent / f"{TEMPORARY}{folder_of(parent, step).name}"


def read(parent: Path, step: int, parts: Collection[str] | None = None) -> Checkpoint:
    """Load the checkpoint of `step`, or only some `parts` of its tensors, without unpickling anything.

    Every file is checked against the manifest before it is loaded. Raises ValueError if a file is damaged, missing or
    foreign. The error names the file and the checkpoint to fall back on.
    """
    folder = folder_of(parent, step)
    try:
        names = [name for name in _listed(folder) if parts is None or _part_of(name) in parts]
        missing = set(parts or ()) - set(map(_part_of, names))
        if missing:
            raise ValueError(f"{folder} contains no {', '.join(sorted(missing))}")
        verify(folder, {*names, "state.json"})
        state = read_json(folder / "state.json")
        files = [name for name in names if name != "state.json"]
        tensors = {
            part: _read_tensors([folder / name for name in files if _part_of(name) == part])
            for part in dict.fromkeys(map(_part_of, files))
        }
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{error}; {_remedy(parent, step)}") from error
    return Checkpoint(step, tensors, state)


def verify(folder: Path, names: Collection[str] | None = None) -> None:
    """Check all files, or only the files in `names`, against the manifest. Raises ValueError at the first mismatch."""
    for name, expected in _listed(folder).items():
        if names is not None and name not in names:
            continue
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        if path.stat().st_size != expected["size"] or _fingerprint(path) != expected:
            raise ValueError(f"{path} is damaged: it does not match the manifest")


def _listed(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the files in a checkpoint's manifest with their sizes and hashes. Raises ValueError if it is invalid."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is damaged or was not written by expert-threshold")
    if manifest.get("version") != VERSION:
        raise ValueError(f"{path} has format version {manifest.get('version')}, but this version reads {VERSION}")
    files = manifest.get("files")
    if not isinstance(files, dict) or "state.json" not in files or manifest.get("step") != int(folder.name[5:]):
        raise ValueError(f"{path} is damaged")
    for name, fingerprint in files.items():
        # This also rejects names that point outside the folder.
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"{path} lists {name!r}, which is not a file of a checkpoint")
        if not isinstance(fingerprint, dict) or fingerprint.keys() != {"size", "sha256"}:
            raise ValueError(f"{path} is damaged")
    return files


def _remedy(parent: Path, step: int) -> str:
    for earlier in reversed([saved for saved in saved_steps(parent) if saved < step]):
        try:
            verify(folder_of(parent, earlier))
        except ValueError:
            continue
        return f"remove {folder_of(parent, step)} to fall back on {folder_of(parent, earlier).name}, which is intact"
    return "no earlier checkpoint is intact: restore this one from a backup, or train again with another --out"


def _part_of(file: str) -> str:
    return _OF_RANK.sub("", file)


def _write_tensors(path: Path, named: Mapping[str, Tensor | Part]) -> None:
    parts = {name: part for name, part in named.items() if isinstance(part, Part)}
    tensors = {name: part.tensor if isinstance(part, Part) else part for name, part in named.items()}
    places = {name: [part.start, *part.shape] for name, part in parts.items()}
    save_tensors(path, tensors, {_PLACES: json.dumps(places)} if places else None)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None) -> None:
    """Write a safetensors file and flush it to disk. Raises OSError if the disk is full."""
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:  # this is how safetensors reports a full disk
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise OSError(f"{path}: {error}") from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    with named(path), path.open("rb") as file:
        os.fsync(file.fileno())


def _read_tensors(paths: list[Path]) -> dict[str, Tensor]:
    """Read a part from the files of all ranks. Raises ValueError unless slices cover each tensor exactly once."""
    tensors: dict[str, Tensor] = {}
    parts: defaultdict[str, list[Part]] = defaultdict(list)
    for path in paths:
        with safe_open(path, "pt") as file:
            places = json.loads((file.metadata() or {}).get(_PLACES, "{}"))
            for name in file.keys():  # noqa: SIM118  no mapping
                tensor = file.get_tensor(name)
                start, *shape = places.get(name, (0, *tensor.shape))
                parts[name].append(Part(tensor, start, tuple(shape)))
    while parts:  # slices are as large as the checkpoint, so free them as soon as they are joined
        name, found = parts.popitem()
        try:
            tensors[name] = _join(found)
        except ValueError as error:
            raise ValueError(f"{paths[0].parent}: {name} cannot be restored: {error}") from None
    return tensors


def _join(parts: list[Part]) -> Tensor:
    """Join the slices of a tensor. Raises ValueError unless they cover it exactly once."""
    shape, dtype = parts[0].shape, parts[0].tensor.dtype
    if len(parts) == 1 and parts[0].tensor.shape == shape and parts[0].start == 0:  # scalars are never split
        return parts[0].tensor
    parts = sorted(parts, key=lambda part: (part.start, part.tensor.numel()))
    end = 0
    for rows, start, whole in parts:
        if whole != shape or rows.dtype != dtype or not shape or rows.ndim != len(shape) or rows.shape[1:] != shape[1:]:
            raise ValueError("its parts belong to different tensors")
        if start != end:
            raise ValueError("its parts overlap" if start < end else "files of a rank are missing")
        end += len(rows)
    if end != shape[0]:
        raise ValueError("files of a rank are missing" if end < shape[0] else "its parts extend beyond its end")
    return torch.cat([part.tensor for part in parts])


def _fingerprint(path: Path) -> dict[str, Any]:
    """Return the size and the hash of a file."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

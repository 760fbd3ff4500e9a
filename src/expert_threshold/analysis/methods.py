"""Groups runs by method, and names the methods in figures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..files import corrupted_file_error
from ..recipes import METHODS
from ..routing import RULES
from ..runs import RunFolder
from .records import Run, read_run, require_numbers
from .sentences import listed

# Options of the training loop that distinguish methods, and options elsewhere that do not. Losses are only comparable
# on the same text, so methods also differ by their text (by hash rather than path) and their validation tokens.
_TRAINING = ("steps", "batch_size", "accumulation", "eval_tokens", "dtype")
_ASIDE = ("model.dispatch", "data.source")
_NAMES = {
    ("model.shared_experts", 0): "no shared expert",
    ("model.gate_norm", "fanout"): "fanout norm",
    ("initialised", True): "initialised",
    ("initialised", False): "from scratch",
}
_TEXT = 24  # the maximum length of a text's name within a method's name


def seed_of(path: Path) -> int | None:
    """Return the seed that names the folder of a run in a comparison, or None for any other folder."""
    found = re.fullmatch("seed_([0-9]+)", path.name)
    return None if found is None else int(found[1])


def find_runs(paths: Sequence[str]) -> list[RunFolder]:
    """Return the run folders at these paths, without duplicates. The folder of a comparison or method yields its runs.

    Raises ValueError for any other folder.
    """
    found: dict[Path, RunFolder] = {}
    for path in map(Path, paths):
        configs = [*path.glob("seed_*/config.json"), *path.glob("*/seed_*/config.json")]
        inside = sorted(config.parent for config in configs if seed_of(config.parent) is not None)
        if not inside and (path / "compare.json").is_file():
            raise ValueError(f"{path}: this comparison has no runs yet; continue it with et compare")
        for run in inside or [path]:
            found.setdefault(run.resolve(), RunFolder.open(run))
    return list(found.values())


class Selection(NamedTuple):
    """The runs to analyse. left_out: reasons, keyed by folder. unfinished: progress, keyed by folder."""

    runs: list[Run]
    left_out: dict[str, str]
    unfinished: dict[str, str]


def select_runs(folders: Sequence[RunFolder]) -> Selection:
    """Select all finished runs, and for methods without any, the unfinished runs that saved a checkpoint.

    Other unfinished runs are left out, since they would shorten the curves of their methods. A second run with the same
    method and seed, such as a copy, is left out too, since it is not another sample. Raises ValueError if a run is
    damaged or no run has saved a checkpoint.
    """
    saved = [folder for folder in folders if folder.latest_checkpoint() is not None]
    left_out = {str(folder.path): "no checkpoint was saved yet" for folder in folders if folder not in saved}
    unfinished: dict[str, str] = {}
    chosen: dict[tuple[str, int], Run] = {}
    read = read_methods(saved or folders)
    finished = {run.method for run in read if run.steps[0] == run.steps[1]}
    for run in read:
        made, steps = run.steps
        path, how_far = str(run.folder.path), f"unfinished, {made:,} of {steps:,} steps"
        if made != steps and run.method in finished:
            left_out[path] = f"{how_far}, but other runs of {run.method} are finished"
            continue
        first = chosen.setdefault((run.method, run.seed), run)
        if first is not run:
            left_out[path] = f"has seed {run.seed} of {run.method}, as does {first.folder.path}; a seed counts once"
        elif made != steps:
            unfinished[path] = how_far
    return Selection(list(chosen.values()), left_out, unfinished)


def read_methods(folders: Sequence[RunFolder]) -> list[Run]:
    """Read the runs, name their methods and sort them by method. Raises ValueError if a run is damaged."""
    read = sorted(map(_read, folders), key=_order)
    every = [options(run) for run in read]
    common = set.intersection(*map(set, every))
    differing = {name for name in common if any(each[name] != every[0][name] for each in every)}
    first: dict[str, dict[str, Any]] = {}
    names: dict[tuple[str, ...], str] = {}
    runs = []
    for run, mine in zip(read, every, strict=True):
        suffixes = _suffixes(mine, first.setdefault(run.kind, mine), differing)
        name = full = (run.label, *suffixes)
        if len(suffixes) > 3:  # too many for a figure; the page has a table of options that differ
            path = run.folder.path
            name = (run.label, "of", path.name if seed_of(path) is None else path.parent.name)
        taken = " ".join(name) in names.values()
        names.setdefault(full, " ".join(full if taken else name))
        runs.append(replace(run, method=names[full]))
    return runs


def _read(folder: RunFolder) -> Run:
    for section in ("model", "rule", "optim", "train", "data", "corpus"):
        folder.section(section)  # raises ValueError if a section is missing
    if folder.latest_checkpoint() is None:
        raise ValueError(f"{folder.path} has no checkpoint yet; train it until the first is saved")
    with corrupted_file_error(folder.path, "restore config.json and metrics.jsonl from a backup, or train again"):
        run = read_run(folder)
        for record in (*run.train, *run.validation):
            require_numbers(record)
        options(run)
        return run


def legend(runs: Sequence[Run]) -> str:
    """Return sentences that explain the labels and the routing in figures, or "" if no run has experts."""
    labels: dict[str, list[str]] = {}
    pooled = []
    for run in runs:
        if run.layers:
            same = labels.setdefault(run.config["rule"]["name"].replace("_", " "), [])
            if run.label not in same:
                same.append(run.label)
                pooled += [run.label] if run.has_cutoffs and run.rule.looks_ahead else []
    if not labels:
        return ""
    parts = [f"{listed(same)} {'is' if len(same) == 1 else 'are'} {name}" for name, same in labels.items()]
    text = f"{'; '.join(parts)}. Routing is causal here, as at inference"
    return f"{text}: by the running means of the cutoffs in {listed(pooled)}." if pooled else f"{text}."


def _order(run: Run) -> tuple[Any, ...]:
    """Return a sort key: dense first, then by rule in the order of `RULES`, by pool size and by method."""
    place = list(METHODS).index(run.kind) if run.kind in METHODS else len(METHODS)
    rank = -1 if run.model.rule is None else list(RULES).index(run.config["rule"]["name"])
    usual = run.model.shared_experts == 1 and run.model.gate_norm is None
    return rank, 0 if run.pool else place, run.pool or 0, place, run.kind, run.label, not usual


def options(run: Run) -> dict[str, Any]:
    """Return the options that define a run, keyed by path, without its seed and machine."""
    config, corpus = run.config, run.config["corpus"]
    sections = {name: config[name] for name in ("model", "optim", "data", "rule")}
    sections["train"] = {name: config["train"][name] for name in _TRAINING}
    flat = {f"{section}.{name}": value for section, each in sections.items() for name, value in each.items()}
    flat["initialised"] = config.get("init_from") is not None  # not the path, since seeds may start from different runs
    flat["text"] = f"{corpus['name'][:_TEXT].strip()} {corpus['hash'][:8]}"
    return {path: value for path, value in flat.items() if path not in _ASIDE}


def _suffixes(mine: Mapping[str, Any], first: Mapping[str, Any], differing: set[str]) -> list[str]:
    """Return suffixes for differences from the first run of this kind and for `_NAMES` that differ between runs."""
    apart = [name for name in mine if mine[name] != first.get(name, mine[name])]
    apart += [name for name in sorted(differing) if (name, mine[name]) in _NAMES and name not in apart]
    if "model.shared_experts" in apart and mine["model.shared_experts"] == 0:  # two routed experts replace it
        apart = [name for name in apart if name != "rule.experts_per_token"]
    values = {name: "on" if name == "text" else name.rpartition(".")[2] for name in apart}
    return [_NAMES.get((name, mine[name])) or f"{shown} {mine[name]}" for name, shown in values.items()]

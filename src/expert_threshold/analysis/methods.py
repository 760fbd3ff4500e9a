"""Groups runs by method, and names the methods in figures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..files import corrupted_file_error
from ..recipes import METHODS, method_named
from ..routing import DENSE, RULES, Rule
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


TEXT = 24
"""The maximum number of characters of a text's name within a method's name."""


class Subject(NamedTuple):
    """A run to analyse, with its method."""

    folder: RunFolder
    run: Run
    kind: str  # the name of the rule in `et compare`; decides the colour
    method: str  # the name in figures

    @property
    def tag(self) -> dict[str, str]:
        """The fields that identify the method of a run in the data of figures."""
        return {"method": self.method, "kind": self.kind}

    @property
    def ordinary(self) -> bool:
        """True if the run has a shared expert and no fanout norm; other runs have separate figures."""
        return self.run.model.shared_experts > 0 and self.run.model.gate_norm is None

    @property
    def steps(self) -> tuple[int, int]:
        """The step of the last checkpoint, and the planned number of steps."""
        return self.folder.latest_checkpoint() or 0, self.run.config["train"]["steps"]

    @property
    def rule(self) -> Rule:
        """The routing rule, which the run must have."""
        assert self.run.model.rule is not None
        return self.run.model.rule

    @property
    def pool(self) -> int:
        """The size of a pool, in tokens, in which every expert gets at least one token."""
        return self.rule.num_experts * max(self.rule.num_experts, math.ceil(1 / self.rule.experts_per_token))

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The minimum and maximum load of an expert in training for `pool` tokens; None without bounds."""
        return self.rule.load_bounds(self.pool)

    @property
    def has_bounds(self) -> bool:
        """True if training bounds the loads and they are not exact by definition."""
        return not self.rule.looks_ahead and self.bounds is not None

    @property
    def layers(self) -> list[int]:
        """The layers with experts."""
        return [] if self.run.model.rule is None else list(range(self.run.model.dense_layers, self.run.model.layers))


def seed_of(path: Path) -> int | None:
    """Return the seed in the folder name of a comparison's run; None for any other folder, such as a copy of a run."""
    found = re.fullmatch("seed_([0-9]+)", path.name)
    return None if found is None else int(found[1])


def find_runs(paths: Sequence[str]) -> list[RunFolder]:
    """Return the run folders at these paths, each once. A comparison, or a method in it, stands for all runs in it.

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
    """The runs to analyse. left_out: reasons for omissions by folder. unfinished: progress by folder."""

    subjects: list[Subject]
    left_out: dict[str, str]
    unfinished: dict[str, str]


def select_runs(folders: Sequence[RunFolder]) -> Selection:
    """Select all finished runs, and for methods without any, the unfinished runs that saved a checkpoint.

    Other unfinished runs are left out, since they would shorten the curves of their methods. So is a second run of a
    method with the same seed, such as a copy, since it is not another sample. Raises ValueError if a run is damaged or
    no run has saved a checkpoint.
    """
    saved = [folder for folder in folders if folder.latest_checkpoint() is not None]
    left_out = {str(folder.path): "no checkpoint was saved yet" for folder in folders if folder not in saved}
    unfinished: dict[str, str] = {}
    chosen: dict[tuple[str, int], Subject] = {}
    read = read_subjects(saved or folders)
    finished = {subject.method for subject in read if subject.steps[0] == subject.steps[1]}
    for subject in read:
        made, steps = subject.steps
        path, how_far = str(subject.folder.path), f"unfinished, {made:,} of {steps:,} steps"
        if made != steps and subject.method in finished:
            left_out[path] = f"{how_far}, but other runs of {subject.method} are finished"
            continue
        seed = subject.run.config["train"]["seed"]
        first = chosen.setdefault((subject.method, seed), subject)
        if first is not subject:
            left_out[path] = f"has seed {seed} of {subject.method}, as does {first.folder.path}; a seed counts once"
        elif made != steps:
            unfinished[path] = how_far
    return Selection(list(chosen.values()), left_out, unfinished)


def read_subjects(folders: Sequence[RunFolder]) -> list[Subject]:
    """Read the runs and sort them by method. Raises ValueError if a run is damaged."""
    read = sorted(map(_read, folders), key=lambda found: _order(found[0]))
    every = [mine for _, mine in read]
    common = set.intersection(*map(set, every))
    differing = {name for name in common if any(each[name] != every[0][name] for each in every)}
    first: dict[str, dict[str, Any]] = {}
    names: dict[tuple[str, ...], str] = {}
    subjects = []
    for subject, mine in read:
        suffixes = _suffixes(mine, first.setdefault(subject.kind, mine), differing)
        name = full = (subject.method, *suffixes)
        if len(suffixes) > 3:  # too many for a figure; the page has a table of options that differ
            path = subject.folder.path
            name = (subject.method, "of", path.name if seed_of(path) is None else path.parent.name)
        taken = " ".join(name) in names.values()
        names.setdefault(full, " ".join(full if taken else name))
        subjects.append(subject._replace(method=names[full]))
    return subjects


def _read(folder: RunFolder) -> tuple[Subject, dict[str, Any]]:
    """Return a run, whose method is still the name of its rule, and its options."""
    for section in ("model", "rule", "optim", "train", "data", "corpus"):
        folder.section(section)  # raises ValueError if a section is missing
    if folder.latest_checkpoint() is None:
        raise ValueError(f"{folder.path}: no checkpoint was saved yet; train it longer")
    with corrupted_file_error(folder.path, "restore config.json and metrics.jsonl from a copy, or train again"):
        run = read_run(folder)
        for record in (*run.train, *run.validation):
            require_numbers(record)
        name = DENSE if run.model.rule is None else run.model.rule.label_of(pool_tokens(run))
        return Subject(folder, run, method_named(run.rule) or name, name), options(run)


def legend(subjects: Sequence[Subject]) -> str:
    """Return sentences on the rule behind each label and on routing in the figures; empty if no run has experts."""
    labels: dict[str, list[str]] = {}
    pooled = []
    for subject in subjects:
        if subject.layers:
            label = subject.rule.label_of(pool_tokens(subject.run))
            same = labels.setdefault(subject.run.rule["name"].replace("_", " "), [])
            if label not in same:
                same.append(label)
                pooled += [label] if subject.run.has_cutoffs and subject.rule.looks_ahead else []
    if not labels:
        return ""
    parts = [f"{listed(same)} {'is' if len(same) == 1 else 'are'} {name}" for name, same in labels.items()]
    text = f"{'; '.join(parts)}. Routing is causal here, as at inference"
    return f"{text}: by the running means of the cutoffs in {listed(pooled)}." if pooled else f"{text}."


def pool_tokens(run: Run) -> int | None:
    """Return the pool size in training, in tokens; None without pools."""
    rule, train = run.model.rule, run.config["train"]
    if rule is None or rule.scope(training=True) == "token":
        return None
    batch = run.model.context * train["batch_size"]
    return rule.window(run.model.context, batch, batch * train["accumulation"]).pool


def _order(subject: Subject) -> tuple[Any, ...]:
    """Return the sort key: dense first, then rules in the order of `RULES`, each by method and pool size."""
    run, pool = subject.run, pool_tokens(subject.run) or 0
    place = list(METHODS).index(subject.kind) if subject.kind in METHODS else len(METHODS)
    rank = -1 if run.model.rule is None else list(RULES).index(run.rule["name"])
    usual = run.model.shared_experts == 1 and run.model.gate_norm is None
    return rank, 0 if pool else place, pool, place, subject.kind, subject.method, not usual


def options(run: Run) -> dict[str, Any]:
    """Return the options that define a run, by path, without its seed and machine."""
    config, corpus = run.config, run.config["corpus"]
    sections = {name: config[name] for name in ("model", "optim", "data", "rule")}
    sections["train"] = {name: config["train"][name] for name in _TRAINING}
    flat = {f"{section}.{name}": value for section, each in sections.items() for name, value in each.items()}
    flat["initialised"] = config.get("init_from") is not None  # not the path, since seeds may start from different runs
    flat["text"] = f"{corpus['name'][:TEXT].strip()} {corpus['hash'][:8]}"
    return {path: value for path, value in flat.items() if path not in _ASIDE}


def _suffixes(mine: Mapping[str, Any], first: Mapping[str, Any], differing: set[str]) -> list[str]:
    """Return suffixes for differences from the first run of its kind, and for `_NAMES` that differ among all runs."""
    apart = [name for name in mine if mine[name] != first.get(name, mine[name])]
    apart += [name for name in sorted(differing) if (name, mine[name]) in _NAMES and name not in apart]
    if "model.shared_experts" in apart and mine["model.shared_experts"] == 0:  # two routed experts replace it
        apart = [name for name in apart if name != "rule.experts_per_token"]
    return [_name(name, mine) for name in apart]


def _name(name: str, mine: Mapping[str, Any]) -> str:
    if name == "text":
        return f"on {mine[name]}"
    return _NAMES.get((name, mine[name])) or f"{name.rpartition('.')[2]} {mine[name]}"

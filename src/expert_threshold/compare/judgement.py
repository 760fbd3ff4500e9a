"""Compares the runs of a comparison with a baseline at equal tokens, FLOPs and seconds, and writes the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from ..analysis.methods import seed_of
from ..analysis.records import Result, Run, damaged, read_run
from ..analysis.results import HEADERS, NOTES, by_method, cells, markdown, over_runs, over_seeds, summarise, to_csv
from ..analysis.sentences import counted, fixed, signed
from ..config import SECTIONS
from ..files import replace_file, replace_json
from ..recipes import REFERENCE, methods
from ..runs import RunFolder
from .experiment import KnownText
from .paired import FEW, Corrected, Difference, corrected, paired

MARGIN = 0.01
"""Default of --margin: the difference in nats per token within which two methods count as equivalent."""

JUDGED = (
    "method", "minus baseline", "verdict", "corrected", "at equal FLOPs", "at equal seconds", "FLOPs", "seconds",
    "seconds to baseline's loss",
)  # fmt: skip
LOADS = (
    "method", "max load / mean, validation", "fanout, training", "tokens without expert", "validation − training",
)  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """A method compared with the baseline over the seeds that both have. Differences are None for the baseline itself.

    difference: difference between the last validation losses, in nats per token. at_flops, at_seconds: difference
    between the losses at the FLOPs or seconds of the cheaper run of each pair. flops: mean FLOPs of a run, given its
    fanout in training. seconds: median training time. seconds_to_loss: median time until the baseline's last loss is
    reached, or None if a run never reached it. Fields that depend on seconds are None unless all runs were timed on
    one machine. corrected: verdict after correction for the number of methods, or None for a single seed.
    """

    method: str
    seeds: int
    difference: Difference | None
    at_flops: Difference | None
    at_seconds: Difference | None
    flops: float
    seconds: float | None
    seconds_to_loss: float | None
    corrected: Corrected | None = None


def chosen_baseline(baseline: str | None, names: Sequence[str]) -> str:
    """Return the baseline, by default token choice or else the first method. Raises ValueError if it is missing."""
    if baseline is None:
        return REFERENCE if REFERENCE in names else names[0]
    if baseline not in names:
        raise ValueError(f"--baseline {baseline} is not among the compared methods; use one of {', '.join(names)}")
    return baseline


def judge(results: Sequence[Result], baseline: str, margin: float = MARGIN, *, timed: bool = True) -> list[Judged]:
    """Compare each method that shares a seed with the baseline, in order of first occurrence."""
    runs = {method: {run.seed: run for run in own} for method, own in by_method(results).items()}
    rows, family = [], dict[str, list[float]]()
    for method, own in runs.items():
        pairs = [(run, runs[baseline][seed]) for seed, run in own.items() if seed in runs.get(baseline, {})]
        if not pairs:
            continue
        last = _minus([(mine.loss, other.loss) for mine, other in pairs])
        by_flops = _minus([_at_equal(mine, mine.flops, other, other.flops) for mine, other in pairs])
        by_seconds = _minus([_at_equal(mine, mine.clock, other, other.clock) for mine, other in pairs]) if timed else []
        if method == baseline:
            last = by_flops = by_seconds = []
        if len(last) > 1:
            family[method] = last
        difference, at_flops, at_seconds = (
            paired(each, margin) if each else None for each in (last, by_flops, by_seconds)
        )
        flops, seconds, seconds_to_loss = mean(mine.flops[-1] for mine, _ in pairs), None, None
        if timed:
            seconds = median(mine.clock[-1] for mine, _ in pairs)
            seconds_to_loss = over_seeds(median, [_seconds_to(mine, other.loss) for mine, other in pairs])
        rows.append(Judged(method, len(pairs), difference, at_flops, at_seconds, flops, seconds, seconds_to_loss))
    verdicts = dict(zip(family, corrected(list(family.values()), margin), strict=True))
    return [replace(row, corrected=verdicts.get(row.method)) for row in rows]


def _minus(losses: Sequence[tuple[float | None, float | None]]) -> list[float]:
    """Return the differences between paired losses, or an empty list if a loss is missing."""
    known = [mine - other for mine, other in losses if mine is not None and other is not None]
    return known if len(known) == len(losses) else []


def _at_equal(
    mine: Result, my_use: Sequence[float], other: Result, its_use: Sequence[float]
) -> tuple[float | None, float | None]:
    """Return both losses at the point where each run had used the total of the cheaper run, or None if one diverged."""
    if mine.loss is None or other.loss is None:
        return None, None
    limit = min(my_use[-1], its_use[-1])
    return loss_at(mine, my_use, limit), loss_at(other, its_use, limit)


def loss_at(run: Result, used: Sequence[float], limit: float) -> float | None:
    """Return the validation loss once `limit` was used, interpolated linearly, or None before the first validation."""
    points = list(zip(used, (loss for _, loss in run.curve), strict=True))
    for (start, before), (end, after) in pairwise([points[0], *points]):
        if limit <= end * (1 + 1e-9):
            if before is None or after is None or (limit < start and end == start):
                return None
            return before + (after - before) * ((limit - start) / (end - start) if end > start else 0.0)
    return points[-1][1]


def _seconds_to(run: Result, goal: float | None) -> float | None:
    """Return the seconds until the run's validation loss fell to `goal`."""
    points = [(at, loss) for at, (_, loss) in zip(run.clock, run.curve, strict=True) if loss is not None]
    return None if goal is None else used_until(points, goal)


def used_until(points: Sequence[tuple[float, float]], goal: float) -> float | None:
    """Return what was used when the loss fell to `goal`, interpolated between points (used, loss), or None if never."""
    for (start, before), (end, after) in pairwise([points[0], *points] if points else []):
        if after <= goal:
            return end - (end - start) * (goal - after) / (before - after) if before > after else end
    return None


def judged_cells(rows: Sequence[Judged], baseline: str) -> list[list[str]]:
    """Return the cells below `JUDGED`."""
    flops = next((row.flops for row in rows if row.method == baseline), 1.0)
    lines = []
    for row in rows:
        verdict: str = "–" if row.difference is None else row.difference.verdict
        verdict = "baseline" if row.method == baseline else verdict
        corrected_verdict = "–" if row.corrected is None else row.corrected.verdict
        differences, cost = (shown(row.at_flops), shown(row.at_seconds)), f"× {row.flops / flops:.3f}"
        seconds = fixed(row.seconds, 0), fixed(row.seconds_to_loss, 0)
        lines.append([row.method, shown(row.difference), verdict, corrected_verdict, *differences, cost, *seconds])
    return lines


def shown(difference: Difference | None) -> str:
    """Return a mean and half the width of its interval as text."""
    if difference is None:
        return "–"
    half = "" if difference.high is None else f" ± {difference.high - difference.mean:.3f}"
    return signed(difference.mean) + half


def load_cells(results: Sequence[Result]) -> list[list[str]]:
    """Return the cells below `LOADS`, which are means over seeds."""
    lines = []
    for method, runs in by_method(results).items():
        names = ("load_spread", "fanout_trained", "unrouted", "gap")
        spread, fanout, without, gap = (over_runs(runs, name) for name in names)
        share = "–" if without is None else f"{100 * without:.1f} %"
        lines.append([method, fixed(spread, 2), fixed(fanout, 3), share, signed(gap)])
    return lines


def notes(rows: Sequence[Judged], baseline: str, margin: float) -> str:
    """Return the explanation of both tables."""
    family = [row.corrected for row in rows if row.corrected is not None]
    correction = "Corrected: needs two seeds or more. "
    if family:
        comparisons = counted(len(family), "comparison")
        correction = f"Corrected: the verdict with Holm's correction for {comparisons} with {baseline}"
        errors = {(each.error, each.freedom) for each in family}
        if len(errors) == 1 and len(family) > 1:
            ((error, freedom),) = errors
            correction += (
                f", whose standard errors, with fewer than {FEW} seeds, are pooled over methods: {error:.4f} with "
                f"{counted(freedom, 'degree')} of freedom"
            )
        correction += ". "
    return (
        f"Differences are validation losses minus {baseline}'s, in nats per token, paired by seed; ± is the 95 % "
        "interval of their mean by Student's t. Verdict: equivalent if the mean lies within "
        f"±{margin:g} by two one-sided tests at 5 %, lower or higher if the interval excludes 0, and open otherwise. "
        f"{correction}"
        "At equal FLOPs or seconds, both losses are read where each run has used as much as the cheaper run of the "
        "pair, interpolated linearly between validations; a run read before its end has not finished its schedule. "
        "FLOPs count training with each step's measured fanout; seconds count optimizer steps. Tokens without expert "
        "are counted in validation. Validation − training is the last validation loss minus the training loss over the "
        "last tenth of the steps; it is missing if a logging interval is longer."
    )


def text_of(run: Run) -> KnownText:
    """Return the text that the run was trained on."""
    folder = run.folder
    return KnownText(run.config["corpus"]["hash"], folder.tokenizer().hash, run.config["data"].get("train_shards"))


def read_runs(folder: Path) -> list[Run]:
    """Return the runs in folder/METHOD/seed_N, sorted by method, in the usual order, and by seed.

    Raises ValueError if a run is damaged.
    """
    found = []
    for path in sorted(folder.glob("*/seed_*/config.json")):
        if (seed := seed_of(path.parent)) is not None:
            opened = RunFolder.open(path.parent)
            for section in (*SECTIONS, "corpus", "machine", "versions"):
                opened.section(section)  # raises ValueError if a section is missing
            if (own := opened.config["train"].get("seed")) != seed:  # a copy would count as another seed
                raise ValueError(f"{opened.path} contains a run with seed {own}; remove it, or rename it to seed_{own}")
            with damaged(opened):
                found.append(read_run(opened, path.parent.parent.name))
            _ = found[-1].result  # raises ValueError if a record is damaged
    place = {method: number for number, method in enumerate(methods())}
    return sorted(found, key=lambda run: (place.get(run.method, len(place)), run.method, run.seed))


@dataclass(frozen=True)
class Findings:
    """The results of finished runs and their comparison with a baseline. margin: the equivalence margin, in nats."""

    headline: str
    runs: Sequence[Run]
    baseline: str
    margin: float

    @cached_property
    def results(self) -> list[Result]:
        return [run.result for run in self.runs if run.result is not None]

    @cached_property
    def judged(self) -> list[Judged]:
        """Each method compared with the baseline. Seconds are compared only if all runs used one machine."""
        machines = {tuple(run.config["machine"][name] for name in ("cpu", "gpu", "threads")) for run in self.runs}
        return judge(self.results, self.baseline, self.margin, timed=len(machines) < 2)

    def tables(self, emphasise: Callable[[str], str]) -> list[tuple[Sequence[str], list[list[str]], str]]:
        """Return the headings, cells and explanation of each table. The best losses are passed through `emphasise`."""
        return [
            (HEADERS, cells(summarise(self.results), emphasise), NOTES),
            (JUDGED, judged_cells(self.judged, self.baseline), ""),
            (LOADS, load_cells(self.results), notes(self.judged, self.baseline, self.margin)),
        ]

    def write(self, folder: Path, file: str) -> None:
        """Write the tables to `file` as JSON, and to compare.csv and compare.md."""
        rows = summarise(self.results)
        content = {
            "headline": self.headline,
            "table": rows,
            "baseline": self.baseline,
            "margin": self.margin,
            "judgement": [asdict(row) for row in self.judged],
            "runs": [result._asdict() for result in self.results],
        }
        tables = [
            markdown(head, lines) + (note and f"\n{note}\n")
            for head, lines, note in self.tables(lambda text: f"**{text}**")
        ]
        replace_json(folder / file, content)
        replace_file(folder / "compare.csv", to_csv(rows).encode())
        replace_file(folder / "compare.md", "\n".join([f"{self.headline}\n", *tables]).encode())

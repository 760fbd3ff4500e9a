"""Sweeps, in which optuna searches each method's options for the lowest validation loss, in one folder."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Console
from torch.quasirandom import SobolEngine

from ..analysis.sentences import counted
from ..config import RunConfig
from ..errors import is_out_of_memory
from ..files import corrupted_file_error, read_json, replace_file, replace_json
from ..install import install
from ..plan import costs
from ..routing import rule_to_dict
from ..runs import RunFolder
from ..train import DivergedError, Text, train
from ..train.log import Display, clock
from ..train.pace import tokens_within
from .experiment import (
    OTHER_FOLDER,
    KnownText,
    options_by_path,
    read_shared_text,
    require_same,
    with_dtype,
    with_shards,
)
from .sweep_page import show_value

if TYPE_CHECKING:
    from optuna.storages import JournalStorage
    from optuna.study import Study
    from optuna.trial import Trial as Asked

SWEEP = "sweep.json"
STUDIES = "studies.jsonl"
"""The name of optuna's journal in the folder, which has a line of JSON for each event."""
SEED = 1000
"""The seed of the sampler, and the first seed of each trial's runs. Comparisons start with seed 0 instead."""
SPREAD = 8
"""The number of first trials, which cover the space evenly; later trials are drawn near good ones."""
UNPRUNED, FIRST = 5, 0.4
"""The number of trials that must finish before any is pruned, and the share of its steps that every trial runs. A high
learning rate lags in the middle of a run and gains as it decays; rules that halve the field early would drop it."""
Options = Mapping[str, Any]


class Dimension(NamedTuple):
    """The values of one option to search. text: the values as typed. values: the choices, keyed by their text.

    distribution: the optuna distribution over numbers or the texts of choices.
    """

    text: str
    distribution: Any
    values: Options = MappingProxyType({})

    def value(self, drawn: Any) -> Any:
        return self.values.get(drawn, drawn)

    @property
    def ends(self) -> Sequence[Any]:
        return tuple(self.values.values()) or (self.distribution.low, self.distribution.high)

    def drawn(self, value: Any) -> Any:
        """Return what optuna draws for this value, or None if the value is outside the space."""
        if self.values:
            return next((text for text, known in self.values.items() if known == value), None)
        low, high = self.ends
        return value if isinstance(value, int | float) and low <= value <= high else None

    def at(self, share: float) -> Any:
        """Return the choice or number at this quantile (below 1) of the choices or of the range."""
        if self.values:
            return list(self.values)[int(share * len(self.values))]
        low, high = self.ends
        value = low * (high / low) ** share if self.distribution.log else low + share * (high - low)
        return round(value) if isinstance(low, int) else value


Space = Mapping[str, Dimension]


def spread(space: Space, number: int) -> dict[str, Any]:
    """Return the draw for each option at point `number`, from 0, of a scrambled Sobol sequence over the space."""
    shares = SobolEngine(len(space), scramble=True, seed=SEED).fast_forward(number).draw(1, dtype=torch.float64)[0]
    return {name: entry.at(share) for (name, entry), share in zip(space.items(), shares.tolist(), strict=True)}


class Trial(NamedTuple):
    """One choice of options and its outcome.

    state: finished, pruned (its best loss so far was above the median of the others), diverged, or refused (its options
    contradict each other or need too much memory). options: values or texts of choices, keyed by name. loss: final loss
    in nats per token, averaged over seeds, or None unless finished. curve: (step, validation loss) of the first seed,
    empty if the loss was copied from an earlier trial with the same options. present: True for the current options.
    """

    trial: int  # from 1
    state: str
    options: Mapping[str, Any]
    loss: float | None
    curve: Sequence[tuple[int, float]]
    seconds: float
    reason: str | None
    present: bool


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the first finished trial with the lowest loss, or None if no trial has finished."""
    return min((trial for trial in trials if trial.loss is not None), key=lambda trial: trial.loss or 0.0, default=None)


class Tunable(NamedTuple):
    """A method to tune. config: its configuration with the current options. present: the draws for these options.

    configure: returns a configuration with other values. Raises ValueError for values that contradict each other.
    """

    config: RunConfig
    space: Space
    present: Options
    configure: Callable[[Options], RunConfig]
    recommend: Callable[[Options], Mapping[str, Any]]


def require_optuna() -> None:
    """Raise ValueError with the remedy if optuna is missing, and silence its messages about trials."""
    try:
        import optuna
    except ImportError:
        raise ValueError(f"a sweep needs optuna, which is missing; run: {install('sweep')}") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclass
class Sweep:
    """A sweep over several methods, with a study for each, in one folder.

    FOLDER/sweep.json, sweep.html     all trials, and the best ones
    FOLDER/METHOD/best.json           the best options, for `et train --config`
    FOLDER/METHOD/trial_001/seed_1000 a run folder without checkpoints
    FOLDER/studies.jsonl              optuna's journal

    trials: number of trials per method. seeds: number of runs per trial. minutes: time limit of this session, or None
    for no limit. start: a description of what the options start from.
    """

    folder: Path
    methods: Mapping[str, Tunable]
    start: Mapping[str, str]
    space: str
    trials: int
    seeds: int
    minutes: float | None
    _studies: dict[str, Study] = field(default_factory=dict)
    _earlier: dict[str, Any] = field(default_factory=dict)  # results of methods that are not tuned this time
    _known: KnownText | None = None
    _text: Text | None = None

    def __post_init__(self) -> None:
        self._rules = {name: rule_to_dict(method.config.model.rule) for name, method in self.methods.items()}
        self._config = next(iter(self.methods.values())).config  # what all runs share except the rule and the space

    def begin(self, console: Console) -> None:
        """Open the studies. A new sweep reads its text first, so that nothing is written if reading fails.

        Raises ValueError if an option differs from the value that the sweep was started with.
        """
        path = self.folder / SWEEP
        if path.exists():
            with corrupted_file_error(path, OTHER_FOLDER):
                record = read_json(path)
                self._known, self._earlier = KnownText(**record["text"]), record["studies"]
                made = sum(len(study["trials"]) for study in self._earlier.values())
                self._config = with_dtype(self._config, record["options"]["train.dtype"])
                rules = {name: dict(rule) for name, rule in record["rules"].items()}
            require_same(self._options(), record["options"], self.folder)
            for name in rules.keys() & self._rules.keys():
                require_same(self._rules[name], rules[name], self.folder)
            self._rules = rules | self._rules
            if made and not (self.folder / STUDIES).exists():
                raise ValueError(f"{self.folder / STUDIES} is missing, and with it {made} trials; {OTHER_FOLDER}")
        else:
            self._config = with_dtype(self._config, None)
            self._read_text(console)
            replace_json(path, self.result())
        storage = open_journal(self.folder / STUDIES)
        self._studies = {name: self._study(name, storage) for name in self.methods}

    def _options(self) -> dict[str, Any]:
        """Return the options that all trials share except the rule, keyed by name or path."""
        paths = options_by_path(self._config.to_dict()).items()
        shared = {path: value for path, value in paths if not path.startswith("rule.")}
        return {**self.start, "space": self.space, "seeds": self.seeds, **shared}

    def _study(self, method: str, storage: JournalStorage) -> Study:
        """Return the method's study. Trials that a killed process left unfinished do not count."""
        import optuna

        steps = self.methods[method].config.train.steps
        pruner = optuna.pruners.MedianPruner(n_startup_trials=UNPRUNED, n_warmup_steps=round(FIRST * steps))
        study = optuna.create_study(storage=storage, pruner=pruner, study_name=method, load_if_exists=True)
        for trial in study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.RUNNING]):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        for _ in study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.WAITING]):
            study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)
        return study

    def results(self, method: str) -> list[Trial]:
        """Return the trials so far in order, excluding interrupted trials."""
        from optuna.trial import TrialState

        found = self._studies[method].get_trials(deepcopy=False, states=[TrialState.COMPLETE, TrialState.PRUNED])
        trials = []
        for number, trial in enumerate(found, start=1):
            told: dict[str, Any] = {"state": "finished", "reason": None} | trial.user_attrs  # set by `_make`
            loss = trial.value if trial.state == TrialState.COMPLETE else None
            curve = sorted(trial.intermediate_values.items())
            trials.append(Trial(trial=number, options=dict(trial.params), loss=loss, curve=curve, **told))
        return trials

    def left(self) -> list[tuple[str, int]]:
        """Return (method, number) of each remaining trial. The methods take turns."""
        made = {method: len(self.results(method)) for method in self.methods}
        return [(method, n) for n in range(1, self.trials + 1) for method in self.methods if n > made[method]]

    def estimate(self) -> float:
        """Estimate the seconds of a trial that is not pruned, from the speed of the first method with experts."""
        config = max((m.config for m in self.methods.values()), key=lambda config: config.model.rule is not None)
        an_hour = tokens_within(3600, config)
        return float(3600 * costs(config)["tokens"] / an_hour * self.seeds)

    def run(self, console: Console) -> None:
        """Run the remaining trials. A signal raises KeyboardInterrupt, and the trial in progress is lost."""
        start, seconds, plan = time.monotonic(), list[float](), self.left()
        if plan:
            self._read_text(console)
        with Display(console) as display:
            for left, (method, number) in zip(reversed(range(len(plan))), plan, strict=True):
                gone = time.monotonic() - start
                if self.minutes is not None and seconds and gone + fmean(seconds) > 60 * self.minutes:
                    display.say(f"{self.minutes:g} minutes are not enough for {counted(left + 1, 'more trial')}")
                    return
                self._make(method, number, display)
                self.write()
                seconds.append(self.results(method)[-1].seconds)
                display.say(f"{self._describe_last(method)}, {clock(fmean(seconds) * left)} left")

    def _read_text(self, console: Console) -> None:
        if self._text is None:
            text = self._text = read_shared_text(self._config, self._known, self.folder, console)
            self._known = KnownText(text.corpus.hash, text.tokenizer.hash, text.corpus.train_shards)

    def _describe_last(self, method: str) -> str:
        """Return a line about the method's last trial, and its best one."""
        results = self.results(method)
        trial, best = results[-1], best_of(results)
        outcome = f"loss {trial.loss:.4f}" if trial.loss is not None else f"{trial.state}: {trial.reason}"
        best_text = "" if best is None else f"  (best {best.loss:.4f}, trial {best.trial})"
        options = "  ".join(f"{option} {show_value(value)}" for option, value in trial.options.items())
        return f"{method} {trial.trial}/{self.trials}  {outcome}{best_text}  {options}  {clock(trial.seconds)}"

    def _make(self, method: str, number: int, display: Display) -> None:
        """Run one trial and report its outcome to its study. An interrupted trial does not count."""
        import optuna
        from optuna.trial import TrialState

        display.draw(f"{method} {number}/{self.trials}", 0, 1)
        study, (_, space, present, *_) = self._studies[method], self.methods[method]
        # Each trial has its own sampler, so that a continued study draws the same values as an uninterrupted one.
        study.sampler = optuna.samplers.TPESampler(seed=SEED + number, n_startup_trials=SPREAD, constant_liar=False)
        has_present = len(present) == len(space)
        is_present = has_present and number == 1
        if number <= SPREAD:
            study.enqueue_trial(dict(present) if is_present else spread(space, number - 1 - has_present))
        trial = study.ask({name: entry.distribution for name, entry in space.items()})
        start, state, loss, why = time.monotonic(), TrialState.FAIL, None, dict[str, str]()
        try:
            loss, why = self._outcome(method, number, trial, display)
            state = TrialState.PRUNED if loss is None else TrialState.COMPLETE
        finally:
            for name, value in {"present": is_present, **why, "seconds": time.monotonic() - start}.items():
                trial.set_user_attr(name, value)
            study.tell(trial, loss, state=state)

    def _outcome(self, method: str, number: int, trial: Asked, display: Display) -> tuple[float | None, dict[str, str]]:
        """Return a trial's loss, or None with the `state` and the `reason` if it has none.

        If an earlier trial had the same options, its loss is returned, since runs are exactly reproducible.
        """
        import optuna

        values = {name: self.methods[method].space[name].value(drawn) for name, drawn in trial.params.items()}
        try:
            config = self.methods[method].configure(values)
        except ValueError as error:
            return None, {"state": "refused", "reason": str(error)}
        for earlier in self.results(method):
            if earlier.loss is not None and earlier.options == trial.params:
                return earlier.loss, {}
        try:
            return fmean(self._train(config, method, number, seed, trial, display) for seed in range(self.seeds)), {}
        except (optuna.TrialPruned, DivergedError) as error:
            state = "diverged" if isinstance(error, DivergedError) else "pruned"
            return None, {"state": state, "reason": str(error).partition(";")[0]}
        except (MemoryError, RuntimeError, TypeError) as error:
            if not is_out_of_memory(error):
                raise
            shutil.rmtree(self._trial_path(method, number), ignore_errors=True)
            return None, {"state": "refused", "reason": "out of memory"}

    def _train(self, config: RunConfig, method: str, number: int, seed: int, trial: Asked, display: Display) -> float:
        """Return the last validation loss of one run of a trial. Raises TrialPruned or DivergedError."""
        import optuna

        path = self._trial_path(method, number) / f"seed_{SEED + seed}"
        shutil.rmtree(path, ignore_errors=True)  # left by an interrupted trial
        steps = config.train.steps
        options = replace(config.train, seed=SEED + seed, dtype=self._config.train.dtype)
        # Save only what `train` always saves at the end; it is deleted afterwards.
        options = replace(options, checkpoint_every=None, sample_every=None, core_every=None)
        run = replace(with_shards(config, self._known), train=options)
        losses: list[float] = []

        def validated(step: int, loss: float) -> None:
            if not math.isfinite(loss):
                raise DivergedError(f"the validation loss was not finite at step {step}")
            losses.append(loss)
            display.draw(f"{method} {number}/{self.trials}  step {step}/{steps}, loss {loss:.4f}", step, steps)
            if seed == 0:
                trial.report(loss, step)
                if step < steps and trial.should_prune():
                    best = f"the best loss by step {step} of {steps}, {min(losses):.4f},"
                    raise optuna.TrialPruned(f"{best} is above the median")

        folder = RunFolder.create(path)
        try:
            result = train(folder, run, text=self._text, validated=validated)
        finally:
            shutil.rmtree(path / "checkpoints", ignore_errors=True)
            folder.tokenizer_path.unlink(missing_ok=True)
        if not result.finished:
            raise KeyboardInterrupt
        skipped = [record for record in folder.metrics.read() if record.get("event") == "skipped_step"]
        if skipped:
            raise DivergedError(f"{counted(len(skipped), 'step')} skipped, the first since {skipped[0]['reason']}")
        return losses[-1]

    def _trial_path(self, method: str, number: int) -> Path:
        return self.folder / method / f"trial_{number:03d}"

    def write(self) -> None:
        """Write sweep.json, and best.json for each method that has a finished trial."""
        replace_json(self.folder / SWEEP, self.result())
        for name, method in self.methods.items():
            best = best_of(self.results(name))
            if best is not None:
                values = {option: method.space[option].value(drawn) for option, drawn in best.options.items()}
                (self.folder / name).mkdir(exist_ok=True)
                replace_json(self.folder / name / "best.json", method.recommend(values))

    def result(self) -> dict[str, Any]:
        """Return the content of sweep.json."""
        return {
            "start": self.start,
            "options": self._options(),
            "rules": self._rules,
            "text": None if self._known is None else self._known._asdict(),
            "studies": self._earlier | {name: self._result(name) for name in self._studies},
        }

    def _result(self, name: str) -> dict[str, Any]:
        trials, method = self.results(name), self.methods[name]
        best = best_of(trials)
        present = next((trial.loss for trial in trials if trial.present), None)
        return {
            "best": None if best is None else best._asdict(),
            "present": present,
            "options": {
                option: {
                    "space": entry.text,
                    "scale": None if entry.values else {n: vars(entry.distribution)[n] for n in ("low", "high", "log")},
                    "best": None if best is None else best.options[option],
                }
                for option, entry in method.space.items()
            },
            "trials": [trial._asdict() for trial in trials],
        }


def open_journal(path: Path) -> JournalStorage:
    """Open optuna's storage in a file after removing an unfinished last line that a killed process left.

    Raises ValueError if the file is damaged.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        replace_file(path, whole)
    try:
        return JournalStorage(JournalFileBackend(str(path)))
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); {OTHER_FOLDER}") from error

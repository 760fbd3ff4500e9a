"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter as now
from typing import Any, NamedTuple

from rich.console import Console

from ..data import DataConfig, Tokenizer, Tokens
from ..distributed import Parallel, Rendezvous, Status, all_reduce_status, from_main, process_groups
from ..evaluation import ModelScorer, Results, ask_core, evaluate
from ..install import et
from ..model import GPT, GPTConfig
from ..optim import OptimConfig
from ..runs import RunFolder, load_model
from ..runs.files import damage_told, replace_file
from .budget import Between, Budget, Decision
from .config import TrainConfig
from .device import objects_at_rest, pick_device
from .interrupt import Interrupt
from .log import Display, Title, clock
from .prepare import Prepared, prepare
from .records import core_record, train_record, validation_record
from .saving import Saver
from .track import Tracker, flatten, tracking
from .trainer import SKIPS_IN_A_ROW, random_state, restore_random_state

Sample = Callable[[GPT, Tokenizer, int], str]
"""Text written by the model after a step; what makes it is handed in."""


class TrainResult(NamedTuple):
    """Where a run stands. loss and bits_per_byte are those of its last validation, None before the first."""

    step: int
    finished: bool  # False where a signal stopped it; a checkpoint of `step` was saved then
    loss: float | None
    bits_per_byte: float | None
    seconds: float  # of training alone, all sessions together
    tokens: int
    elapsed: float  # seconds with validation, samples and checkpoints, too; without CORE
    opening: str | None  # the first words of the validation text


def train(
    folder: RunFolder,
    model: GPTConfig,
    data: DataConfig,
    optim: OptimConfig,
    config: TrainConfig,
    *,
    resume: bool = False,
    init_from: Path | None = None,
    continue_warmup: bool = False,
    minutes: float | None = None,
    sample: Sample | None = None,
    console: Console | None = None,
    title: Title = lambda left: "",
    rendezvous: Rendezvous | None = None,
) -> TrainResult:
    """Train in a folder that was created for it or, with `resume`, go on from its last checkpoint.

    init_from: a run whose weights, cutoffs or biases, and tokenizer to begin with; with continue_warmup its steps count
    towards the rule's warmup, too. minutes: the time the run is given, by which its steps are decided again and again;
    see `budget`. sample: writes text every `sample_every` steps. console: where progress is shown; None is nowhere.
    title: opens its lines about steps. rendezvous: the ranks that train together, each calling this alike.
    On SIGINT and SIGTERM it ends the step, saves and returns. Raises ValueError for options that do not fit each other,
    the run or the machine, and after ten steps in a row that were skipped; OSError where the disk is full.
    Earlier checkpoints are never harmed.
    """
    if config.sample_every is not None and sample is None:
        raise ValueError(
            f"sample_every={config.sample_every} needs `sample`, which writes the text; use None without it"
        )
    if resume and init_from is not None:
        raise ValueError(f"init_from={init_from} begins another run; leave it out to resume {folder.path}")
    if continue_warmup and init_from is None:
        raise ValueError("continue_warmup goes on with the warmup of another run; name that with --init-from")
    leads = rendezvous is None or rendezvous.rank == 0
    display = Display(console if leads else None, title)
    with (
        _locked(folder, rendezvous),
        Interrupt(quiet=rendezvous is not None) as interrupt,
        display,
        process_groups(
            rendezvous,
            pick_device(config.device),
            expert_parallel=config.expert_parallel,
            shard=config.shard,
            timeout=config.timeout,
        ) as parallel,
    ):
        prepared = prepare(folder, model, data, optim, config, resume, init_from, continue_warmup, display, parallel)
        if minutes is not None and not resume:
            prepared.record["time"] = {"minutes": minutes, "decisions": []}
        step = prepared.trainer.step
        with tracking(config.track if leads else "none", folder, prepared.record, step) as tracker:
            parallel.from_main(lambda: _begin(folder, prepared, step))
            run = _Run(folder, prepared, config, sample, display, tracker, parallel)
            run.tell_skipped_text(prepared.skipped)
            interrupt.deferred = True
            try:
                with objects_at_rest():
                    return run.run(interrupt)
            finally:
                run.close()


@contextmanager
def _locked(folder: RunFolder, rendezvous: Rendezvous | None) -> Iterator[None]:
    """The folder, held by the first rank for all; refused on all where it is on that one."""
    with ExitStack() as stack:
        from_main(rendezvous, lambda: stack.enter_context(folder.lock()))
        yield


def _begin(folder: RunFolder, prepared: Prepared, step: int) -> None:
    folder.write_config(prepared.record)
    if step == 0:
        folder.write_tokenizer(prepared.tokenizer)
    folder.metrics.truncate_after(step)


def _done(folder: RunFolder) -> tuple[list[Any], list[int], list[Any]]:
    """Of the metrics: the validations, the steps at which CORE was asked, the dead experts that were told."""
    records = folder.metrics.read()
    with damage_told(folder.metrics.path, "restore it from a copy, or delete that line"):
        return (
            [[r["step"], r["loss"], r["bits_per_byte"]] for r in records if r["split"] == "validation"],
            [r["step"] for r in records if r["split"] == "core"],
            [[r["layer"], r["expert"]] for r in records if r.get("event") == "dead_expert"],
        )


def opening(text: Tokens, tokenizer: Tokenizer) -> str | None:
    """Returns the first three words that stand in one line of the text, None where its beginning has no such line."""
    lines = tokenizer.decode(text.ids[1 : text.offsets[1]][:256].tolist()).splitlines()
    words = (line.split()[:3] for line in lines)
    return next((" ".join(found) for found in words if len(found) == 3 and "".join(found).isprintable()), None)


class _StoppedError(Exception):
    """A signal has asked to end what takes long and can be gone on with."""


class _Run:
    """The steps of one session and what happens between them."""

    def __init__(
        self,
        folder: RunFolder,
        prepared: Prepared,
        config: TrainConfig,
        sample: Sample | None,
        display: Display,
        tracker: Tracker | None,
        parallel: Parallel,
    ) -> None:
        self.folder = folder
        self.parallel = parallel
        self.saver = Saver(folder, parallel, config.keep_checkpoints)
        self.trainer = prepared.trainer
        self.record = prepared.record
        if (time := prepared.record.get("time")) is not None:
            with damage_told(folder.path / "config.json", "restore it from a copy, or train again"):
                self.trainer.budget = Budget(config.steps, 60 * time["minutes"], time["decisions"])
        self.tokenizer = prepared.tokenizer
        self.validation = prepared.validation
        self.core = prepared.core
        self.config = config
        self.sample = sample
        self.display = display
        self.tracker = tracker
        validated, asked, dead = parallel.from_main(lambda: _done(folder))
        self.validated: dict[int, tuple[float | None, float | None]] = {step: (a, b) for step, a, b in validated}
        self.asked = set(asked)
        self.dead = set(map(tuple, dead))

    def run(self, interrupt: Interrupt) -> TrainResult:
        trainer = self.trainer
        self.begun = now() - trainer.elapsed
        trainer.ballot = lambda: self.saver.ballot(interrupt.requested)
        self.display.begin(trainer.step, self.steps)
        if trainer.step > 0:
            self.look(interrupt)  # whatever a stop right after saving has left undone
        while trainer.step < self.steps and not self.is_stopped(interrupt):
            self.advance()
            if self.is_due(self.config.checkpoint_every) or self.is_at_end or self.is_whole_model_due():
                self.save()
            if not self.is_stopped(interrupt):
                self.look(interrupt)
        pending = self.is_validation_pending() or self.is_sample_pending() or self.is_core_pending()
        done = self.is_at_end and not pending
        if not done:
            self.save()
        self.saver.finish(self.vote)
        if not done:
            self.display.say(
                f"stopped at step {trainer.step} of {self.steps}; to go on: {et()} train --resume {self.folder.path}"
            )
        loss, bits_per_byte = self.validated[max(self.validated)] if self.validated else (None, None)
        words = None if self.validation is None else opening(self.validation, self.tokenizer)
        elapsed = now() - self.begun
        return TrainResult(trainer.step, done, loss, bits_per_byte, trainer.seconds, trainer.tokens, elapsed, words)

    @property
    def steps(self) -> int:
        """Of the whole run, as decided so far."""
        return self.trainer.budget.steps_at(self.trainer.step)

    @property
    def is_at_end(self) -> bool:
        return self.trainer.step == self.steps

    @contextmanager
    def timed(self, what: str | None = None) -> Iterator[None]:
        """A step or, named, what is done between two of them; tells the budget how long it took."""
        before = now()
        yield
        self.trainer.budget.took(now() - before, what)
        self.trainer.elapsed = now() - self.begun

    @property
    def between(self) -> dict[str, Between]:
        """What is done between steps; validation is forward alone, about a third of what a step does for a token."""
        config, found = self.config, {"checkpoint": Between(self.config.checkpoint_every)}
        if config.eval_every is not None and self.validation is not None:
            tokens = min(len(self.validation), config.eval_tokens or math.inf)
            per_step = config.batch_size * config.accumulation * self.trainer.model.config.context
            found["validation"] = Between(config.eval_every, tokens / per_step / 3)
        if config.sample_every is not None:
            found["sample"] = Between(config.sample_every)
        return found

    def decide(self) -> None:
        """Decide the number of steps again where that is due, on the first rank for all, and keep what was decided."""
        trainer, budget = self.trainer, self.trainer.budget
        if budget.seconds is None:
            return
        decided = self.parallel.from_main(lambda: budget.decide(trainer.step, trainer.elapsed, self.between))
        if decided is None:
            return
        before, decision = self.steps, Decision(*decided)
        budget.take(decision)
        if decision.steps != before:
            self.display.steps(decision.steps)
        if abs(decision.steps - before) > 0.01 * before:
            self.display.say(
                f"step {trainer.step}: {clock(decision.seconds)} of {clock(budget.seconds)} are gone; "
                f"{decision.steps:,} steps fit in, not {before:,}"
            )
        self.record["train"] |= {"steps": decision.steps}
        self.record["time"] |= {"decisions": [list(each) for each in budget.decisions]}
        if self.parallel.is_main:
            self.folder.write_config(self.record)

    def close(self) -> None:
        """End the threads."""
        self.trainer.loader.close()
        self.saver.close()

    def vote(self, ballot: Status) -> Status:
        """All ranks' votes, outside of a step."""
        return all_reduce_status(ballot, self.parallel.world, self.parallel.device)

    def is_stopped(self, interrupt: Interrupt) -> bool:
        """Whether a signal has asked for it; of several ranks, any one in time for the last step's votes."""
        return interrupt.requested if self.parallel.world is None else self.trainer.votes.stop > 0

    def is_due(self, every: int | None) -> bool:
        return every is not None and (self.trainer.step % every == 0 or self.is_at_end)

    def advance(self) -> None:
        """One step, and its line of metrics where one is due."""
        trainer = self.trainer
        with self.timed():
            made = trainer.advance()
        self.decide()
        self.saver.heed(trainer.votes)
        if not made:
            self.tell_skipped()
        self.tell_skipped_text(trainer.loader.take_skipped())
        interval = trainer.take_interval() if self.is_due(self.config.log_every) else None
        if interval is not None:
            last, budget = trainer.step - 1, trainer.budget
            record = train_record(trainer.model, interval) | {
                "learning_rate": trainer.optimizers.learning_rates(last, budget.scheduled, budget.place(last)),
                "tokens": trainer.tokens,
                "tokens_per_second": interval.tokens_per_second,
                "seconds": trainer.seconds,
                "skipped": trainer.skipped,
            }
            self.write("train", record)
            self.display.record(trainer.step, record)
            self.tell_dead_experts(record, interval.steps)
        self.display.step(trainer.step)

    def tell_skipped(self) -> None:
        """Raises ValueError after too many in a row."""
        trainer = self.trainer
        why = trainer.not_finite
        self.write("event", {"event": "skipped_step", "in_a_row": trainer.skipped_in_a_row, "reason": why})
        self.display.say(f"step {trainer.step}: {why}; the step was skipped and changed nothing")
        if trainer.skipped_in_a_row >= SKIPS_IN_A_ROW:
            optim = trainer.optimizers.config
            raise ValueError(
                f"{SKIPS_IN_A_ROW} steps in a row were skipped, the last of them step {trainer.step}, since {why}; "
                f"train with smaller learning rates than matrix_lr={optim.matrix_lr}, embed_lr={optim.embed_lr}, "
                f"head_lr={optim.head_lr}, from the start or with --init-from {self.folder.path}"
            )

    def tell_skipped_text(self, lines: Iterable[str]) -> None:
        """Each says what is wrong with a shard, or a part of one, that was left out."""
        for line in lines:
            self.write("event", {"event": "skipped_text", "reason": line})
            self.display.say(f"skipped: {line}")

    def tell_dead_experts(self, record: dict[str, Any], steps: int) -> None:
        """Each of them once. record: of the last `steps` steps."""
        for layer, values in record["layers"].items():
            for expert, usage in enumerate(values["usage"]):
                if usage == 0 and (int(layer), expert) not in self.dead:
                    self.dead.add((int(layer), expert))
                    self.write("event", {"event": "dead_expert", "layer": int(layer), "expert": expert})
                    self.display.say(
                        f"warning: expert {expert} of layer {layer} got no token in the last {steps} steps"
                    )

    def save(self) -> None:
        with self.timed("checkpoint"):
            self.saver.finish(self.vote)
            self.saver.begin(self.trainer.checkpoint())

    def look(self, interrupt: Interrupt) -> None:
        """Validate, sample and ask CORE where that is due and not done yet."""
        trainer = self.trainer
        if self.is_validation_pending():
            assert self.validation is not None
            with self.timed("validation"):
                validation = evaluate(
                    trainer.model,
                    self.validation,
                    self.tokenizer,
                    batch_size=self.config.batch_size,
                    max_tokens=self.config.eval_tokens,
                    group=self.parallel.world,
                    progress=self.display.task("validating"),
                )
            self.write("validation", validation_record(trainer.model, validation))
            self.validated[trainer.step] = validation.loss, validation.bits_per_byte
            self.display.measured(
                trainer.step,
                f"validation loss {validation.loss:.4f}  {validation.bits_per_byte:.4f} bits per byte",
            )
        if self.is_whole_model_due() and self.parallel.splits_model:
            self.saver.finish(self.vote)  # the first rank reads it
        if self.is_sample_pending():
            with self.timed("sample"):
                self.parallel.from_main(self.write_sample)
        if self.is_core_pending():
            before = now()
            answered = self.parallel.from_main(lambda: self.ask_core(interrupt))
            self.begun += now() - before  # questions are no part of the time that a run is given
            if answered:
                self.asked.add(trainer.step)

    def write_sample(self) -> None:
        assert self.sample is not None
        trainer = self.trainer
        random = random_state(trainer.device)
        text = self.sample(self.whole_model(), self.tokenizer, trainer.step)
        restore_random_state(random, trainer.device)
        trainer.model.train()
        self.folder.samples.mkdir(exist_ok=True)
        replace_file(self.sample_path, text.encode())

    def ask_core(self, interrupt: Interrupt) -> bool:
        """False where a signal came before the end; what was answered until then is in evaluation.json."""

        def progress(task: str) -> Callable[[int, int], None]:
            tell = self.display.task(f"CORE, {task}")

            def told(done: int, total: int) -> None:
                if interrupt.requested and done < total:
                    raise _StoppedError
                tell(done, total)

            return told

        trainer, model = self.trainer, self.whole_model()
        try:
            core = ask_core(
                Results(self.folder.path, model, trainer.step),
                self.core,
                ModelScorer(model, self.tokenizer),
                progress,
                max_per_task=self.config.core_max_per_task,
            )
        except _StoppedError:
            return False
        record = core_record(core)
        self.write("core", record)
        self.display.measured(trainer.step, f"CORE {record['metric']:.4f}")
        return True

    def whole_model(self) -> GPT:
        """On the first rank, for what only that one does: of a model in parts, what was just saved."""
        trainer = self.trainer
        if not self.parallel.splits_model:
            return trainer.model
        return load_model(self.folder.path, trainer.step, trainer.device, trainer.model.compute_dtype)[0]

    def is_whole_model_due(self) -> bool:
        return self.is_core_pending() or (self.parallel.splits_model and self.is_sample_pending())

    def is_core_pending(self) -> bool:
        step = self.trainer.step
        due = self.is_at_end or self.is_due(self.config.core_every)
        return bool(self.core) and due and step not in self.asked

    def is_validation_pending(self) -> bool:
        return self.is_due(self.config.eval_every) and self.trainer.step not in self.validated

    def is_sample_pending(self) -> bool:
        return self.is_due(self.config.sample_every) and not self.parallel.from_main(self.sample_path.exists)

    @property
    def sample_path(self) -> Path:
        return self.folder.samples / f"step_{self.trainer.step:06d}.txt"

    def write(self, split: str, record: dict[str, Any]) -> None:
        if not self.parallel.is_main:
            return
        self.folder.metrics.append({"step": self.trainer.step, "split": split} | record)
        if self.tracker is not None:
            self.tracker.log(self.trainer.step, flatten(record, split))

"""Lets lm-evaluation-harness evaluate runs (extra `eval`).

`et evaluate RUN --harness TASK` evaluates tasks. The harness's own command line offers everything else:

    python -m expert_threshold.integrations.lm_eval run --model expert_threshold --model_args run=RUN --tasks TASK
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ..data import Tokenizer
from ..evaluation import Progress
from ..generate.engine import Engine, Request
from ..model import GPT, Continuation, crop, score
from ..model.score import TOKENS_AT_ONCE
from ..option import did_you_mean
from ..runs import load_model

GROUPS_AT_ONCE = 256  # groups between two progress reports

log = logging.getLogger(__name__)


class HarnessModel(TemplateLM):
    """Answers the harness's three kinds of requests in batches of up to `tokens_at_once` tokens.

    Every text starts a document. Routing is causal. Contexts that are too long are truncated on the left.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        *,
        tokens_at_once: int = TOKENS_AT_ONCE,
        progress: Progress = lambda what: lambda done, total: None,
    ) -> None:
        super().__init__()
        self.model, self.run_tokenizer = model.eval(), tokenizer
        self.tokens_at_once, self.progress = tokens_at_once, progress

    @property
    def eot_token_id(self) -> int:
        """The token that starts the next document and therefore ends the current one."""
        return self.run_tokenizer.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = self.run_tokenizer.encode(string)
        return ids if add_special_tokens is False else [self.run_tokenizer.bos, *ids]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability in nats and whether greedy decoding would generate it."""
        continuations = [Continuation(given + ending, len(given)) for _, given, ending in requests]
        found = self._score(continuations, "loglikelihood", misses=True)
        answers = [(-nats, misses == 0) for nats, _, misses in found]
        return self._cached("loglikelihood", [texts for texts, _, _ in requests], answers)

    def loglikelihood_rolling(self, requests: Sequence[Instance], **_: Any) -> list[float]:
        """Return the log-probabilities of whole texts in nats, computed in windows of the context length."""
        windows: list[tuple[int, Continuation]] = []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(ids, self.eot_token_id, self.model.config.context, 1):
                given, ending = make_disjoint_window(window)
                windows.append((i, Continuation(given + ending, len(given))))
        found = self._score([window for _, window in windows], "loglikelihood_rolling", misses=False)
        sums = [0.0] * len(requests)
        for (i, _window), scored in zip(windows, found, strict=True):
            sums[i] -= scored.nats
        return self._cached("loglikelihood_rolling", [request.args for request in requests], sums)

    def _score(self, continuations: Sequence[Continuation], what: str, *, misses: bool) -> list[Any]:
        """Score continuations. Those that share a context, such as the choices of a question, are scored together."""
        length = self.model.config.context + 1  # the last token is predicted, not read
        if lost := sum(len(c.tokens) - c.start > length - 1 for c in continuations):
            log.warning("with a context of %d tokens, only the ends of %d continuations are scored", length - 1, lost)
        by_beginning: dict[tuple[int, ...], list[int]] = {}
        for i, c in enumerate(continuations):
            by_beginning.setdefault(tuple(c.tokens[: c.start]), []).append(i)
        groups = sorted(by_beginning.values(), key=lambda group: -len(continuations[group[0]].tokens))
        found: dict[int, Any] = {}
        report = self.progress(what)
        for first in range(0, len(groups), GROUPS_AT_ONCE):
            some = groups[first : first + GROUPS_AT_ONCE]
            cropped = [[crop(continuations[i], length) for i in group] for group in some]
            scores = score(self.model, cropped, misses=misses, tokens_at_once=self.tokens_at_once)
            for group, of_group in zip(some, scores, strict=True):
                found |= zip(group, of_group, strict=True)
            report(len(found), len(continuations))
        return [found[i] for i in range(len(continuations))]

    def _cached(self, kind: str, keys: Sequence[Any], answers: list[Any]) -> list[Any]:
        """Add the answers to the harness's cache and return them."""
        for key, answer in zip(keys, answers, strict=True):
            self.cache_hook.add_partial(kind, key, answer)
        return answers

    def generate_until(self, requests: Sequence[Instance], **_: Any) -> list[str]:
        """Return the text generated after each context, up to a stop sequence or the document's end, excluding it.

        Generation may fill up to half of the context. Raises ValueError for an unknown sampling parameter.
        """
        context = self.model.config.context
        engine = Engine(self.model, self.run_tokenizer, slots=max(self.tokens_at_once // context, 1))
        writings = []
        for number, request in enumerate(requests):
            asked = read_request(request.args[1], context)
            prompt = self.tok_encode(request.args[0])[-(context - asked.max_tokens) :]
            writings.append(engine.add(asked._replace(prompt=tuple(prompt), seed=number)))
        report = self.progress("generate_until")
        while engine.busy:
            if any(writing.finished for writing in engine.step()):
                report(sum(writing.finished for writing in writings), len(writings))
        texts = ["".join(step.text for step in writing.steps) for writing in writings]
        return self._cached("generate_until", [request.args for request in requests], texts)


def read_request(options: Mapping[str, Any], context: int) -> Request:
    """Convert the harness's sampling parameters to a request without a prompt. Temperature 0 means greedy decoding.

    Raises ValueError if a parameter is not supported.
    """
    left = dict(options)
    until = left.pop("until", None) or ()
    wanted = int(left.pop("max_gen_toks", 256))
    if wanted > context // 2:
        log.warning("max_gen_toks=%d was reduced to half of the context of %d", wanted, context)
    do_sample = left.pop("do_sample", None)
    temperature = float(left.pop("temperature", 1.0 if do_sample else 0.0))
    samples = do_sample is not False and temperature > 0
    top_k = left.pop("top_k", None)
    if unknown := [name for name in left if samples or name not in ("top_p", "min_p")]:
        name = unknown[0]
        raise ValueError(f"{name}={left[name]!r} is not supported here; omit it, or set do_sample to false")
    return Request(
        prompt=(),
        max_tokens=min(wanted, context // 2),
        temperature=temperature if samples else 0.0,
        top_k=top_k or None,
        stop=tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop),
    )


@register_model("expert_threshold")
class RunModel(HarnessModel):
    """The model of a run folder, for the harness's own command line.

    step: the step of the checkpoint, by default the last. batch_size: full-length texts in a batch, "auto", "auto:4", …
    """

    def __init__(
        self, run: str, step: int | None = None, device: str | None = None, dtype: str = "float32",
        batch_size: int | str = "auto", max_batch_size: int | None = None,
    ) -> None:  # fmt: skip
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={dtype!r} is unknown; use float32 or bfloat16")
        if not torch.cuda.is_available() and (device is None or device.startswith("cuda")):
            device = "cpu"  # the harness passes cuda:0 by default
        model, tokenizer = load_model(run, step, device or "cuda", getattr(torch, dtype))
        sizes = [int(n) for n in (batch_size, max_batch_size) if n is not None and not str(n).startswith("auto")]
        at_once = min(sizes) * model.config.context if sizes else TOKENS_AT_ONCE
        super().__init__(model, tokenizer, tokens_at_once=at_once)


class Harness:
    """Tasks and groups of the harness, selected by name. folder: a folder with additional tasks.

    Raises ValueError if a name is unknown.
    """

    def __init__(self, names: Sequence[str], folder: str | Path | None = None) -> None:
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"--harness-path {folder} is not a folder; use a folder that contains YAML files of tasks")
        self.names = names
        if folder is not None:  # avoids indexing the harness's own thousands of tasks, which takes seconds
            self._manager = TaskManager(include_path=str(folder), include_defaults=False)
        if folder is None or not set(names) <= set(self._manager.all_tasks):
            self._manager = TaskManager(include_path=None if folder is None else str(folder))
        for name in names:
            if name not in self._manager.all_tasks:
                otherwise = "lm-eval ls tasks lists all tasks, and --harness-path adds more"
                remedy = did_you_mean(name, self._manager.all_tasks, otherwise)
                raise ValueError(f"--harness: unknown task {name}; {remedy}")

    def ask(
        self, model: GPT, tokenizer: Tokenizer, progress: Progress, max_per_task: int | None = None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each name with its results, keyed by task and metric, as soon as they are available.

        Raises ValueError if a task's questions cannot be loaded.
        """
        lm = HarnessModel(model, tokenizer, progress=progress)
        for name in self.names:
            try:
                loaded = self._manager.load([name])
            except Exception as error:  # packages that read data sets raise errors of many types
                reason = " ".join(str(error).split()) or type(error).__name__
                raise ValueError(f"--harness {name}: its questions cannot be loaded: {reason[:300]}") from error
            group = loaded["groups"].get(name)
            tasks = [*loaded["tasks"].values()] if group is None else [group]
            # A new task manager would index all of the harness's tasks.
            how: Any = {"task_manager": self._manager, "limit": max_per_task}
            found = lm_eval.simple_evaluate(lm, tasks=tasks, log_samples=False, bootstrap_iters=1000, **how)
            yield name, {task: _numbers(metrics) for task, metrics in found["results"].items()}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return each metric's value and standard error (or None). Names may end with a comma and a filter."""
    found = {}
    for name, value in metrics.items():
        metric, comma, answers = name.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
            error = metrics.get(f"{metric}_stderr,{answers}")
            stderr = float(error) if isinstance(error, int | float) and math.isfinite(error) else None
            found[name.removesuffix(",none")] = {"value": float(value), "stderr": stderr}
    return found


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()

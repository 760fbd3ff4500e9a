"""A run as a model of lm-evaluation-harness, from the extra `eval`.

`et evaluate RUN --harness TASK` asks tasks of it; all that the harness can do is there with

    python -m expert_threshold.integrations.lm_eval run --model expert_threshold --model_args run=RUN --tasks TASK
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import lm_eval
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from ..generate.engine import Sampler
from ..model import GPT, Continuation, crop, score
from ..model.score import TOKENS_AT_ONCE
from ..runs import load_model

REQUESTS_AT_ONCE = 256  # between two tellings of progress

log = logging.getLogger(__name__)

Progress = Callable[[str], Callable[[int, int], None]]
"""Told what is measured, returns what wants to be told how much of it is done, and of how much."""


class RunTokenizer(Protocol):
    """What of a run's tokenizer is needed here."""

    @property
    def bos(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class HarnessModel(TemplateLM):
    """A model that answers the harness's three kinds of requests, in batches of at most `tokens_at_once` tokens.

    Every text opens a document. Routing is causal. A context that does not fit loses its beginning.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: RunTokenizer,
        *,
        tokens_at_once: int = TOKENS_AT_ONCE,
        progress: Progress = lambda what: lambda done, total: None,
    ) -> None:
        super().__init__()
        self.model = model.eval()
        self.run_tokenizer = tokenizer
        self.tokens_at_once = tokens_at_once
        self.progress = progress

    @property
    def eot_token_id(self) -> int:
        """A document ends where the next one begins."""
        return self.run_tokenizer.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = self.run_tokenizer.encode(string)
        return ids if add_special_tokens is False else [self.run_tokenizer.bos, *ids]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, in nats, and whether greedy decoding writes it."""
        continuations = [Continuation(given + ending, len(given)) for _, given, ending in requests]
        found = [(-nats, misses == 0) for nats, _, misses in self._score(continuations, "loglikelihood", misses=True)]
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Instance], **_: Any) -> list[float]:
        """The log-probability of whole texts, in nats, each in windows of the context."""
        windows: list[Continuation] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(ids, self.eot_token_id, self.model.config.context, 1):
                given, ending = make_disjoint_window(window)
                windows.append(Continuation(given + ending, len(given)))
                owners.append(i)
        sums = [0.0] * len(requests)
        for i, found in zip(owners, self._score(windows, "loglikelihood_rolling", misses=False), strict=True):
            sums[i] -= found.nats
        for request, answer in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return sums

    def _score(self, continuations: Sequence[Continuation], what: str, *, misses: bool) -> list[Any]:
        """Their scores. Those with the same beginning, as the choices of a question have, stand next to each other."""
        length = self.model.config.context + 1  # the last token is predicted, not read
        lost = sum(len(c.tokens) - c.start > length - 1 for c in continuations)
        if lost:
            log.warning("%d continuations are longer than the context of %d: their ends are scored", lost, length - 1)
        by_beginning: dict[tuple[int, ...], list[int]] = {}
        for i, c in enumerate(continuations):
            by_beginning.setdefault(tuple(c.tokens[: c.start]), []).append(i)
        groups = sorted(by_beginning.values(), key=lambda group: -len(continuations[group[0]].tokens))
        found: list[Any] = [None] * len(continuations)
        tell, done = self.progress(what), 0
        for some in _parts(groups, REQUESTS_AT_ONCE):
            cropped = [[crop(continuations[i], length) for i in group] for group in some]
            scores = score(self.model, cropped, misses=misses, tokens_at_once=self.tokens_at_once)
            for group, of_group in zip(some, scores, strict=True):
                for i, each in zip(group, of_group, strict=True):
                    found[i] = each
                done += len(group)
            tell(done, len(continuations))
        return found

    def generate_until(self, requests: Sequence[Instance], **_: Any) -> list[str]:
        """What the model writes after each context, until a stop sequence, which is left out, or the document's end.

        At most half of the context is for what it writes. Raises ValueError for an option of sampling that is unknown.
        """
        context = self.model.config.context
        how = [Sampling.read(request.args[1], context) for request in requests]
        prompts = [
            self.tok_encode(request.args[0])[-(context - sampling.max_tokens) :]
            for request, sampling in zip(requests, how, strict=True)
        ]
        order = sorted(range(len(requests)), key=lambda i: -len(prompts[i]))
        at_once = max(self.tokens_at_once // context, 1)
        texts = [""] * len(requests)
        tell = self.progress("generate_until")
        generator = torch.Generator().manual_seed(0)
        for start in range(0, len(order), at_once):
            rows = order[start : start + at_once]
            written = self._write([prompts[i] for i in rows], [how[i] for i in rows], generator)
            for i, text in zip(rows, written, strict=True):
                texts[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
            tell(start + len(rows), len(order))
        return texts

    @torch.inference_mode()
    def _write(self, prompts: list[list[int]], how: list[Sampling], generator: torch.Generator) -> list[str]:
        """All rows in step, behind as many tokens as the shortest prompt has: of a longer one the rest is read so."""
        begun = min(map(len, prompts)) - 1
        end = max(len(prompt) + sampling.max_tokens for prompt, sampling in zip(prompts, how, strict=True)) - 1
        device = self.model.embed.weight.device
        cache = self.model.new_cache(len(prompts), end)
        if begun:
            prefix = torch.tensor([prompt[:begun] for prompt in prompts], device=device)
            self.model(prefix, torch.full_like(prefix, -1), cache=cache)  # without a target no logits are made
        rows = [list(prompt) for prompt in prompts]
        texts: list[str | None] = [None] * len(rows)
        for place in range(begun, end):
            column = torch.tensor([[row[place] if place < len(row) else 0] for row in rows], device=device)
            logits = self.model(column, cache=cache).logits[:, -1]
            likeliest = logits.argmax(-1).tolist()
            for i, (row, prompt, sampling) in enumerate(zip(rows, prompts, how, strict=True)):
                if texts[i] is None and place + 1 == len(row):
                    row.append(sampling.draw(logits[i], generator) if sampling.temperature else likeliest[i])
                    texts[i] = sampling.ended(self.run_tokenizer, row[len(prompt) :])
            if None not in texts:
                break
        return [text for text in texts if text is not None]


class Sampling(NamedTuple):
    """How a text is to be written, and until when. temperature 0 takes the likeliest token."""

    until: tuple[str, ...]
    max_tokens: int
    temperature: float
    top_k: int | None

    @classmethod
    def read(cls, options: Mapping[str, Any], context: int) -> Sampling:
        """Of a request. Raises ValueError for a way to sample that is unknown here."""
        left = dict(options)
        until = left.pop("until", None) or ()
        wanted = int(left.pop("max_gen_toks", 256))
        if wanted > context // 2:
            log.warning("max_gen_toks=%d is cut to half of the context of %d", wanted, context)
        do_sample = left.pop("do_sample", None)
        temperature = float(left.pop("temperature", 1.0 if do_sample else 0.0))
        samples = do_sample is not False and temperature > 0
        top_k = left.pop("top_k", None)
        unknown = {name: value for name, value in left.items() if samples or name not in ("top_p", "min_p")}
        if unknown:
            name, value = next(iter(unknown.items()))
            raise ValueError(f"{name}={value!r} is unknown to generation here; leave it out, or set do_sample to false")
        stops = (until,) if isinstance(until, str) else tuple(until)
        return cls(stops, min(wanted, context // 2), temperature if samples else 0.0, top_k or None)

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        return Sampler(self.temperature, self.top_k, generator)(logits.cpu())

    def ended(self, tokenizer: RunTokenizer, ids: list[int]) -> str | None:
        """The text, once it is at its end."""
        whole = ids[-1] == tokenizer.bos
        text = tokenizer.decode(ids[:-1] if whole else ids)
        places = [text.find(stop) for stop in self.until if stop and stop in text]
        if places:
            return text[: min(places)]
        return text if whole or len(ids) >= self.max_tokens else None


@register_model("expert_threshold")
class RunModel(HarnessModel):
    """The same by the name of a run, for the harness's own command line.

    step: the checkpoint, None is the last. batch_size: texts as long as the context at once, or "auto".
    """

    def __init__(
        self,
        run: str,
        step: int | None = None,
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
    ) -> None:
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={dtype!r} is unknown; use float32 or bfloat16")
        if not torch.cuda.is_available() and (device is None or device.startswith("cuda")):
            device = "cpu"  # the harness says cuda:0 where nobody said anything
        model, tokenizer = load_model(run, step, device or "cuda", getattr(torch, dtype))
        sizes = [int(size) for size in (batch_size, max_batch_size) if size not in (None, "auto")]
        at_once = min(sizes) * model.config.context if sizes else TOKENS_AT_ONCE
        super().__init__(model, tokenizer, tokens_at_once=at_once)


class Harness:
    """Tasks of the harness by their names, groups of them too; folder: where there are more than its own.

    Raises ValueError for a name that there is not.
    """

    def __init__(self, names: Sequence[str], folder: str | Path | None = None) -> None:
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"--harness-path {folder}: no such folder; name one with the YAML files of tasks")
        self.names = names
        if folder is not None:  # reading the harness's own thousands takes seconds
            self._manager = TaskManager(include_path=str(folder), include_defaults=False)
        if folder is None or not set(names) <= set(self._manager.all_tasks):
            self._manager = TaskManager(include_path=None if folder is None else str(folder))
        for name in names:
            if name not in self._manager.all_tasks:
                near = get_close_matches(name, self._manager.all_tasks, 1)
                hint = f"did you mean {near[0]}?" if near else "lm-eval ls tasks lists all, --harness-path adds more"
                raise ValueError(f"--harness {name}: unknown task; {hint}")

    def ask(
        self, model: GPT, tokenizer: RunTokenizer, progress: Progress, max_per_task: int | None = None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """A name, and by the names of its tasks and of their metrics the results, as soon as they are there.

        Raises ValueError where the questions cannot be had.
        """
        lm = HarnessModel(model, tokenizer, progress=progress)
        for name in self.names:
            try:
                loaded = self._manager.load([name])
            except Exception as error:  # any of the packages that read data sets may raise its own
                reason = " ".join(str(error).split()) or type(error).__name__
                raise ValueError(f"--harness {name}: its questions cannot be read: {reason[:300]}") from error
            group = loaded["groups"].get(name)
            found = lm_eval.simple_evaluate(
                lm,
                tasks=[*loaded["tasks"].values()] if group is None else [group],
                task_manager=self._manager,  # another one would read all of the harness's tasks
                limit=max_per_task,
                log_samples=False,
                bootstrap_iters=1000,
            )
            yield name, {task: _numbers(metrics) for task, metrics in found["results"].items()}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Value and standard error, None where there is none, of each metric; behind a comma stands its filter, if any."""
    found = {}
    for name, value in metrics.items():
        metric, comma, answers = name.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
            error = metrics.get(f"{metric}_stderr,{answers}")
            stderr = float(error) if isinstance(error, int | float) and math.isfinite(error) else None
            found[name.removesuffix(",none")] = {"value": float(value), "stderr": stderr}
    return found


def _parts(groups: Iterable[list[int]], size: int) -> Iterator[list[list[int]]]:
    """Groups with `size` members in all or a little more."""
    part: list[list[int]] = []
    for group in groups:
        part.append(group)
        if sum(map(len, part)) >= size:
            yield part
            part = []
    if part:
        yield part


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()

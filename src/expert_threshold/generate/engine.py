"""Generates text token by token, for one sequence or for many that join and leave a running batch."""

from __future__ import annotations

import codecs
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..data import Tokenizer
from ..kernels.cpu.decode import decoder_sample
from ..model import GPT
from . import decoder
from .decoder import Decoded, Decoder, LogitStats

Finish = Literal["stop", "length"]
NOT_FINITE = "the model's logits are not finite, so no token can be chosen; use another checkpoint"


class TokenRouting(NamedTuple):
    """One token's routing in one layer: its scores for all experts, the experts it went to, and their gates."""

    scores: tuple[float, ...]
    experts: tuple[int, ...]
    gates: tuple[float, ...]


class Step(NamedTuple):
    """One token, and the text that it completes. A character split across tokens belongs to the last of them.

    logprob: in nats, from the model itself, before temperature and top-k apply; None if no token precedes this one.
    finish: None while more tokens follow, "stop" at the end of the document or at a stop string, or "length" once
    max_tokens or the context is exhausted. routing: one record per MoE layer, if the request asked to record it.
    top: the likeliest tokens at this position with their logprobs, as many as the request asked for. echoed: the token
    belongs to the prompt.
    """

    token: int
    text: str
    logprob: float | None
    finish: Finish | None
    routing: tuple[TokenRouting, ...] | None
    top: tuple[tuple[int, float], ...] = ()
    echoed: bool = False


class Request(NamedTuple):
    """A prompt and its sampling parameters, which `check` validates.

    A temperature of 0 picks the likeliest token; top_k=None and top_p=1 sample from all tokens. The same seed gives the
    same tokens, and None selects a random one. repetition_penalty: see `penalize`; 1 changes nothing. stop: strings
    that end the text and are not part of it. tops: the number of likeliest tokens to report in each step. echo: also
    report the prompt's tokens as steps. record: report the routing of each token. rate: the target number of routed
    experts per token in every layer; None keeps the rate.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_at_document_end: bool = True
    tops: int = 0
    echo: bool = False
    record: bool = False
    rate: float | None = None

    def check(self, context: int) -> None:
        """Raise ValueError if an option is out of range, or if the prompt leaves no room in the context."""
        count, penalty, seed = len(self.prompt), self.repetition_penalty, self.seed
        for valid, name, must in (
            (self.max_tokens >= 0, "max_tokens", "at least 0"),
            (0 <= self.temperature < math.inf, "temperature", "finite and at least 0; 0 picks the likeliest token"),
            (self.top_k is None or self.top_k >= 1, "top_k", "at least 1; none samples from all tokens"),
            (0 < self.top_p <= 1, "top_p", "above 0 and at most 1; use 1 to sample from all tokens"),
            (0.01 <= penalty <= 100, "repetition_penalty", "between 0.01 and 100; use 1 for no penalty"),
            (seed is None or 0 <= seed < 2**63, "seed", "an integer from 0 to 2**63 - 1; none picks one"),
        ):
            if not valid:
                raise ValueError(f"{name}={getattr(self, name)} must be {must}")
        if not count:
            raise ValueError("the prompt has no tokens; it needs at least the token that starts a document")
        if count + min(self.max_tokens, 1) > context:
            raise ValueError(f"a prompt of {count} tokens leaves no room in a context of {context} tokens; shorten it")


class Sampler:
    """Draws tokens on the CPU, so that a seed gives the same result on every device."""

    def __init__(self, temperature: float, top_k: int | None, generator: torch.Generator, top_p: float = 1.0) -> None:
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self._numbers = _uniform(generator)
        self._draw = sample if decoder.library() is None else decoder_sample

    def __call__(self, logits: Tensor) -> int:
        """Draw a token id from float32 logits (vocab,) on the CPU. Raises ValueError if any of them is NaN."""
        if self.temperature == 0:
            return int(logits.argmax())
        count = len(logits) if self.top_k is None else min(self.top_k, len(logits))
        token = self._draw(logits, self.temperature, count, self.top_p, next(self._numbers))
        if token < 0:
            raise ValueError("logits contain NaN, so no token can be drawn; use another checkpoint of the model")
        return token


def _uniform(generator: torch.Generator) -> Iterator[float]:
    """Yield uniform random numbers in [0, 1). Drawing 64 at a time costs little more than drawing one."""
    while True:
        yield from torch.rand(64, dtype=torch.float64, generator=generator).tolist()


def sample(logits: Tensor, temperature: float, most: int, top_p: float, number: float) -> int:
    """Sample by top-k (`most`) and top-p: return the token at the quantile `number`, from [0, 1), of what remains.

    Returns -1 if a logit is NaN. This is equivalent to `decoder_sample`, but uses PyTorch operations.
    """
    likeliest, tokens = logits, None
    if most < len(logits) or top_p < 1:
        likeliest, tokens = logits.topk(most)
    # With float64 and the maximum shifted to 0, even the smallest temperature does not overflow.
    sums = ((likeliest.double() - likeliest.max()) / temperature).exp().cumsum(0)
    if sums[-1].isnan():
        return -1
    if top_p < 1:  # keep the fewest tokens whose probabilities add up to at least top_p
        sums = sums[: int(torch.searchsorted(sums, top_p * sums[-1])) + 1]
    place = min(int(torch.searchsorted(sums, number * sums[-1], right=True)), len(sums) - 1)
    return place if tokens is None else int(tokens[place])


def penalize(logits: Tensor, tokens: Sequence[int], penalty: float) -> Tensor:
    """Return logits (vocab,) where those of `tokens` are divided by the penalty if positive, and otherwise multiplied.

    A penalty above 1 thus makes tokens that already occurred less likely. Keskar et al., CTRL (2019).
    """
    places = torch.tensor(tokens)
    seen = logits[places]
    return logits.scatter(0, places, torch.where(seen > 0, seen / penalty, seen * penalty))


class TextStream:
    """Decodes tokens as they arrive, and holds back text that may turn out to be the start of a stop string."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, content: bytes, final: bool, stop: Sequence[str] = ()) -> tuple[str, bool]:
        """Return the text that can be shown now, and whether a stop string follows it."""
        text = self._held + self._decoder.decode(content, final)
        places = [place for each in stop if (place := text.find(each)) >= 0]
        if places:
            return text[: min(places)], True
        begun = (n for each in stop for n in range(min(len(each), len(text) + 1)) if text.endswith(each[:n]))
        held = 0 if final else max(begun, default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False


class TokenDistribution(NamedTuple):
    """The distribution of a sequence's next token: its logits (vocab,), on the CPU, and their statistics."""

    logits: Tensor
    peak: LogitStats

    @classmethod
    def of(cls, decoded: Decoded) -> list[TokenDistribution]:
        """Return one distribution for each row of logits."""
        return list(map(cls, decoded.logits.cpu().unbind(), decoded.peaks))

    @property
    def finite(self) -> bool:
        """False if a logit is NaN or +∞, or if all are −∞, because then no token can be chosen."""
        return math.isfinite(self.peak.logsumexp)

    def logprob(self, token: int) -> float:
        likeliest, highest, logsumexp = self.peak
        return (highest if token == likeliest else float(self.logits[token])) - logsumexp

    def top(self, count: int) -> tuple[tuple[int, float], ...]:
        if not count:
            return ()
        values, tokens = self.logits.topk(min(count, len(self.logits)))
        logprobs = values.double() - self.peak.logsumexp  # as in `logprob`
        return tuple(zip(tokens.tolist(), logprobs.tolist(), strict=True))


class ActiveRequest:
    """A request in progress, with its steps so far, which begin with those of the prompt if it is echoed.

    room: how many tokens fit after the prompt. error: why it finished early, or None.
    """

    def __init__(self, request: Request, room: int) -> None:
        self.request = request
        self.unread = request.prompt  # the rest of the prompt
        self.left = min(request.max_tokens, room)
        self.steps: list[Step] = []
        self.finished = False
        self.error: str | None = None
        self.next: TokenDistribution | None = None  # after the tokens read so far; None before the first
        self.text = TextStream()  # of the echoed prompt, if any, and what follows: a character may span both
        generator = torch.Generator()
        if request.seed is None:
            generator.seed()
        else:
            generator.manual_seed(request.seed)
        self._sampler = Sampler(request.temperature, request.top_k, generator, request.top_p)
        self._taken = 0

    def take(self) -> tuple[Step, ...]:
        """Return the steps that previous calls have not returned."""
        taken, self._taken = self._taken, len(self.steps)
        return tuple(self.steps[taken:])

    def choose(self) -> int:
        """Return the next token."""
        assert self.next is not None
        request = self.request
        if request.repetition_penalty != 1:
            tokens = [*request.prompt, *(step.token for step in self.steps if not step.echoed)]
            return self._sampler(penalize(self.next.logits, tokens, request.repetition_penalty))
        return self.next.peak.likeliest if request.temperature == 0 else self._sampler(self.next.logits)


@dataclass
class Counts:
    """The totals of an engine: prompt tokens read, tokens written, routed tokens (counted once per MoE layer), and the
    token-expert pairs of the routed tokens.
    """

    read: int = 0
    written: int = 0
    routed: int = 0
    assignments: int = 0

    def add_routing(self, decoded: Decoded) -> None:
        layers, tokens, _ = decoded.assignment.shape
        self.routed += layers * tokens
        self.assignments += decoded.assigned


class Engine:
    """Generates texts with continuous batching: a request joins the batch when a row is free, and leaves it when done.

    A request's result depends on that request alone, because each token is routed by its own scores. With strict=True,
    this holds to the last bit. slots: the number of rows in the batch. capacity: the number of tokens per row, by
    default the context length. dial: the largest rate that a request may ask for, or None if the rate is fixed. The
    engine copies the model's weights once and never changes the model.
    """

    def __init__(
        self, model: GPT, tokenizer: Tokenizer, *, slots: int = 8, capacity: int | None = None, strict: bool = False
    ) -> None:
        self.context = model.config.context
        self.tokenizer = tokenizer
        self.decoder = Decoder(model, slots, capacity or self.context, strict=strict)
        self.model = self.decoder.model  # a snapshot, so that the caller's copy of the weights can be freed
        self.dial = largest_rate(self.model)
        self.waiting: deque[ActiveRequest] = deque()
        self.running: dict[int, ActiveRequest] = {}
        self.counts = Counts()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def check(self, request: Request) -> None:
        """Raise ValueError if the request is invalid or the model does not support its rate."""
        request.check(self.context)
        self.model.check_rate(request.rate)

    def add(self, request: Request) -> ActiveRequest:
        """Add a request to the queue for a free row. Raises ValueError if it is invalid."""
        self.check(request)
        room = self.decoder.capacity - len(request.prompt)
        writing = ActiveRequest(request, room)
        self.waiting.append(writing)
        return writing

    def cancel(self, writing: ActiveRequest) -> None:
        """Cancel a request and free its row."""
        writing.finished = True
        if writing in self.waiting:
            self.waiting.remove(writing)
        for row, running in list(self.running.items()):
            if running is writing:
                self._finish(row)

    def step(self) -> list[ActiveRequest]:
        """Admit waiting requests, prefill part of one prompt, and decode a token in every row that is prefilled.

        Returns the requests that made progress.
        """
        for row in range(self.decoder.rows):
            if self.waiting and row not in self.running:
                self.running[row] = self.waiting.popleft()
                self.decoder.open(row, self.running[row].request.rate)
        ready = {row: writing for row, writing in self.running.items() if not writing.unread}
        self._write(ready)
        reading = [(row, writing) for row, writing in self.running.items() if writing.unread][:1]
        for row, writing in reading:
            self._read(row, writing)
        return [*ready.values(), *(writing for _, writing in reading)]

    def _finish(self, row: int, error: str | None = None) -> None:
        writing = self.running.pop(row)
        writing.finished, writing.error = True, error
        self.decoder.close(row, wipe=error is not None)

    def _write(self, ready: dict[int, ActiveRequest]) -> None:
        chosen = {row: writing.choose() for row, writing in ready.items()}
        made = {row: self._make(writing, chosen[row]) for row, writing in ready.items()}
        forward = {r: chosen[r] for r, w in ready.items() if made[r].finish is None or w.request.record}
        if forward:
            decoded = self.decoder.step(forward)
            self.counts.add_routing(decoded)
            for i, (row, follows) in enumerate(zip(sorted(forward), TokenDistribution.of(decoded), strict=True)):
                ready[row].next = follows
                if ready[row].request.record:
                    made[row] = made[row]._replace(routing=_routing(decoded, i))
        self.counts.written += len(ready)
        for row, writing in ready.items():
            broken = row in forward and writing.next is not None and not writing.next.finite
            if not (broken and writing.request.record):  # routing would not be finite either
                writing.steps.append(made[row])
            if broken:
                self._finish(row, NOT_FINITE)
            elif made[row].finish is not None:
                self._finish(row)

    def _make(self, writing: ActiveRequest, token: int) -> Step:
        """Return the step for a chosen token. Its routing is not yet known."""
        assert writing.next is not None
        request = writing.request
        writing.left -= 1
        ended = request.stop_at_document_end and token == self.tokenizer.bos
        last = ended or not writing.left
        content = b"" if ended else self.tokenizer.decode_bytes([token])
        text, stopped = writing.text.push(content, final=last, stop=request.stop)
        finish: Finish | None = "stop" if ended or stopped else "length" if last else None
        return Step(token, text, writing.next.logprob(token), finish, None, writing.next.top(request.tops))

    def _read(self, row: int, writing: ActiveRequest) -> None:
        """Prefill the next part of a prompt."""
        request = writing.request
        piece, writing.unread = writing.unread[: decoder.PREFILL], writing.unread[decoder.PREFILL :]
        decoded = self.decoder.read(row, piece, every=request.echo)
        self.counts.read += len(piece)
        self.counts.add_routing(decoded)
        follows = TokenDistribution.of(decoded)
        if not all(each.finite for each in follows):
            self._finish(row, NOT_FINITE)
            return
        if request.echo:
            for i, (token, known) in enumerate(zip(piece, [writing.next, *follows[:-1]], strict=True)):
                writing.steps.append(self._echo(writing, token, known, decoded, i))
        writing.next = follows[-1]
        if not writing.unread and not writing.left:
            self._finish(row)

    def _echo(
        self, writing: ActiveRequest, token: int, known: TokenDistribution | None, decoded: Decoded, i: int
    ) -> Step:
        request = writing.request
        opens = token == self.tokenizer.bos
        content = b"" if opens else self.tokenizer.decode_bytes([token])
        last = len(writing.steps) + 1 == len(request.prompt) and not writing.left  # otherwise more text follows
        text, _ = writing.text.push(content, final=opens or last)
        logprob, top = (None, ()) if known is None else (known.logprob(token), known.top(request.tops))
        routing = _routing(decoded, i) if request.record else None
        return Step(token, text, logprob, None, routing, top, echoed=True)


def largest_rate(model: GPT) -> float | None:
    """Return the largest rate that the model supports, or None if it can only run at the rate it was trained for."""
    try:
        model.check_rate(0)
    except ValueError:
        return None
    return None if model.config.rule is None else model.config.rule.num_experts


def _routing(decoded: Decoded, row: int) -> tuple[TokenRouting, ...]:
    found = []
    for layer, (scores, assignment) in enumerate(zip(decoded.scores[:, row], decoded.assignment[:, row], strict=True)):
        # One token at a time, since the last bit of σ may depend on how many are computed at once.
        gates = scores.sigmoid() if decoded.gates is None else decoded.gates[layer, row]
        experts, own = assignment.nonzero()[:, 0], scores[: len(assignment)]
        found.append(TokenRouting(tuple(own.tolist()), tuple(experts.tolist()), tuple(gates[experts].tolist())))
    return tuple(found)


def generate(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = 50,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop_at_document_end: bool = True,
    record: bool = False,
    rate: float | None = None,
) -> Iterator[Step]:
    """Continue a prompt, which is either a text that starts a document, or token ids that are used unchanged.

    See `Request` for the options. The document ends when the model starts the next one, with a step that has a token
    but no text. The prompt and the continuation together never exceed the context. The model is not changed, and its
    weights are read once, at the first step. Raises ValueError if an option is out of range, if the prompt is empty or
    leaves no room for a token, or if a logit is not finite.
    """
    ids = [tokenizer.bos, *tokenizer.encode(prompt)] if isinstance(prompt, str) else list(prompt)
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1")
    request = Request(
        tuple(ids),
        max_tokens,
        temperature,
        top_k,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop_at_document_end=stop_at_document_end,
        record=record,
        rate=rate,
    )
    request.check(model.config.context)
    model.check_rate(rate)

    def steps() -> Iterator[Step]:
        engine = Engine(model, tokenizer, slots=1, capacity=min(len(ids) + max_tokens, model.config.context))
        writing = engine.add(request)
        while not writing.finished:
            engine.step()
            yield from writing.take()
        if writing.error is not None:
            raise ValueError(writing.error)

    return steps()

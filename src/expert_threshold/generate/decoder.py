"""Incremental decoding: appends a few tokens at a time to sequences, each of which has its own row in a cache.

There are two implementations that share the cache: `GPT.forward` and, where it applies, the C++ code in
`kernels/cpu/decode.cpp`, which computes a whole step in one call. Tests compare them for every option of the trunk.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..kernels import forbidden
from ..kernels.cpu import decode
from ..kernels.cpu.decode import decoder_add_layer, decoder_append, decoder_create, decoder_destroy
from ..model import GPT, Cache, Output
from ..model.attention import rotary
from ..model.gpt import Block
from ..moe import Router, RoutingHistory
from ..routing import Rule

PREFILL = 256
"""The maximum number of prompt tokens in a forward pass, which bounds the memory for masks and logits."""
SHARED = 2**19
"""The number of multiplications from which several threads are used. Below it, they cost more than they save."""


class LogitStats(NamedTuple):
    """The index and the value of the highest logit, and log Σ exp(logit)."""

    likeliest: int
    highest: float
    logsumexp: float


class Decoded(NamedTuple):
    """The results of appending tokens to sequences.

    `logits` has the shape (requested tokens, vocab) in float32, and `peaks` has one entry per row of logits. `scores`
    (layers, tokens, num_scores), the boolean `assignment` and `gates` (layers, tokens, experts) cover all tokens and
    MoE layers. `gates` is None if the gates are σ(scores). `assigned` is the total number of token-expert pairs.
    """

    logits: Tensor
    peaks: list[LogitStats]
    scores: Tensor
    assignment: Tensor
    gates: Tensor | None
    assigned: int

    @classmethod
    def of(cls, output: Output, rule: Rule | None) -> Decoded:
        """Build the record from a forward pass that recorded its routing and had no targets. rule: the model's rule."""
        assert output.logits is not None
        assert output.routings is not None
        logits = output.logits.flatten(0, 1)
        highest, likeliest = logits.max(-1)
        peaks = list(map(LogitStats, likeliest.tolist(), highest.tolist(), logits.logsumexp(-1).tolist()))
        if rule is None or not output.routings:
            nothing = logits.new_empty(0, len(logits), 0)
            return cls(logits, peaks, nothing, nothing.bool(), nothing, 0)
        scores, assignment, gates = (
            torch.stack([getattr(routing, name).flatten(0, 1) for routing in output.routings])
            for name in ("scores", "assignment", "gates")
        )
        assignment, gates = (part[..., : rule.num_experts] for part in (assignment, gates))  # null slots may follow
        return cls(logits, peaks, scores, assignment, None if rule.sigmoid_gates else gates, int(assignment.sum()))

    @classmethod
    def join(cls, parts: Sequence[Decoded]) -> Decoded:
        """Concatenate the results of several parts, in order."""
        if len(parts) == 1:
            return parts[0]
        logits, peaks, scores, assignment, gates, assigned = zip(*parts, strict=True)
        return cls(
            logits=torch.cat(logits),
            peaks=[peak for some in peaks for peak in some],
            scores=torch.cat(scores, 1),
            assignment=torch.cat(assignment, 1),
            gates=None if gates[0] is None else torch.cat(gates, 1),
            assigned=sum(assigned),
        )


class Decoder:
    """Appends tokens to sequences, with a kernel if one applies and with `GPT.forward` and a cache otherwise.

    The decoder uses a snapshot of the model, and holds up to `rows` sequences of up to `capacity` tokens. If `strict`
    is True, a sequence gets the same bits alone as in a batch. The kernel always guarantees this. `GPT.forward` does so
    only row by row, since rounding depends on the number of rows and on how threads divide them.
    """

    def __init__(self, model: GPT, rows: int, capacity: int, *, strict: bool = False) -> None:
        self.model = model.snapshot()
        self.rows, self.capacity, self.strict = rows, capacity, strict
        self.cache = self.model.new_cache(rows, capacity)
        self.kernel = kernel_of(self.model, self.cache)
        self._pasts = self._pasts_at(None)  # the snapshot never changes

    def open(self, row: int, rate: float | None = None) -> None:
        """Start an empty sequence in a row, with `rate` routed experts per token. None uses the model's own rate."""
        pasts = self._pasts if rate is None else self._pasts_at(rate)
        self.cache.begin(row, pasts)
        if self.kernel is not None:
            self.kernel.begin(row, pasts)

    def _pasts_at(self, rate: float | None) -> dict[int, RoutingHistory]:
        return {layer: moe.router.past(rate) for layer, moe in self.model.moe_layers()}

    def close(self, row: int, *, wipe: bool = False) -> None:
        """End a row's sequence, and clear its keys and values if `wipe` is True. This is needed if they may not be
        finite: attention multiplies entries beyond a sequence's end by 0, but 0 · NaN is NaN.
        """
        self.cache.begin(row, {})
        if wipe:
            self.cache.held[:, row] = 0

    def read(self, row: int, tokens: Sequence[int], *, every: bool = False) -> Decoded:
        """Append up to PREFILL tokens to a row's sequence. Only the last token gets logits unless `every` is True."""
        count = len(tokens)
        assert 0 < count <= PREFILL, f"{count} tokens at once"
        self._require_room([row], count)
        if self.kernel is not None and count <= self.kernel.most:
            start = self.cache.lengths[row]
            return self._step_kernel([row] * count, tokens, range(start, start + count), 0 if every else count - 1)
        return self._forward([row], [tokens], last=not every)

    def step(self, tokens: Mapping[int, int]) -> Decoded:
        """Append one token to the sequence of each given row. The results are in ascending order of the rows."""
        rows = sorted(tokens)
        self._require_room(rows, 1)
        if self.kernel is not None:
            lengths = self.cache.lengths
            return self._step_kernel(rows, [tokens[row] for row in rows], [lengths[row] for row in rows])
        together = [[row] for row in rows] if self.strict else [rows]
        return Decoded.join([self._forward(some, [[tokens[row]] for row in some]) for some in together])

    def _step_kernel(
        self, rows: Sequence[int], tokens: Sequence[int], places: Sequence[int], first: int = 0
    ) -> Decoded:
        assert self.kernel is not None
        decoded = self.kernel.append(rows, tokens, places, first)
        for row in rows:
            self.cache.lengths[row] += 1
        return decoded

    def _require_room(self, rows: Sequence[int], count: int) -> None:
        longest = max(self.cache.lengths[row] for row in rows) + count
        if longest > self.capacity:  # the kernel would write beyond the row
            raise ValueError(f"{longest} tokens do not fit in a cache row of {self.capacity} tokens")

    @torch.inference_mode()
    def _forward(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], last: bool = False) -> Decoded:
        cache = self.cache.select(rows)
        ids = torch.tensor(tokens, device=cache.held.device)
        output = self.model(ids, cache=cache, record=True, last=last)
        return Decoded.of(output, self.model.config.rule)


class Kernel:
    """Appends a few tokens to cached sequences, like `GPT.forward`, with results that do not depend on the batch.

    This wraps a C++ decoder that holds the model's weights, the thresholds of each row, and the cache.
    """

    most = 64
    """The largest number of tokens in one row for which the kernel is faster than matrix products."""

    def __init__(self, model: GPT, cache: Cache) -> None:
        config = model.config
        self._vocab, self._rows, self._capacity = config.vocab_size, len(cache.lengths), cache.capacity
        self._softmax = config.rule is not None and config.rule.softmax_gates
        self._thresholds: dict[int, Tensor] = {}  # (rows, experts), by layer
        self._work = config.vocab_size * config.d_model  # multiplications for a token that goes to one expert
        places = torch.arange(cache.capacity, dtype=torch.float32, device="cpu")
        cos, sin = rotary(places, cache.held.shape[-1], config.rotary_base)
        self._decoder = decoder_create(
            embed=model.embed.weight.float(),
            head=model.head.weight,
            cos=cos,
            sin=sin,
            qk_scale=config.qk_scale,
            offset_from=next((layer for layer in range(config.layers) if config.has_key_offset(layer)), config.layers),
            cache=cache.held,
            last=cache.last,
            smear_gate=None if model.smear_gate is None else model.smear_gate.weight,
            smear=_numbers(model.smear_scalar, 1, 0.0)[0],
            backout=_numbers(model.backout_scalar, 1, 0.0)[0],
            eps=torch.finfo(torch.float32).eps,
            softcap=config.softcap,
        )
        weakref.finalize(self, decoder_destroy, self._decoder).atexit = False  # at exit, the process frees it
        residual = _numbers(model.residual_scalars, config.layers, 1.0)
        skip = _numbers(model.skip_scalars, config.layers, 0.0)
        for block, *scalars in zip(model.blocks, residual, skip, strict=True):
            self._add(block, *scalars)

    def begin(self, row: int, pasts: Mapping[int, RoutingHistory]) -> None:
        """Start an empty sequence in a row. See `Cache.begin` for the arguments."""
        for layer, thresholds in self._thresholds.items():
            past = pasts[layer].thresholds
            assert past is not None
            thresholds[row] = past

    def append(self, rows: Sequence[int], tokens: Sequence[int], places: Sequence[int], first: int = 0) -> Decoded:
        """Append each token at its position in a row of the cache, and return the logits from token `first` on.

        The tokens of a row must be in order. Raises IndexError if a token is not in the vocabulary.
        """
        count = len(tokens)
        if not 0 <= min(tokens) <= max(tokens) < self._vocab:
            raise IndexError(f"token ids must be between 0 and {self._vocab - 1}, not {min(tokens)} to {max(tokens)}")
        threads = torch.get_num_threads() if count * self._work >= SHARED else 1
        logits, peaks, scores, assignment, assigned = decoder_append(
            self._decoder, list(tokens), list(rows), list(places), first, threads
        )
        found = [LogitStats(int(likeliest), highest, logsumexp) for likeliest, highest, logsumexp in peaks.tolist()]
        gates = scores.softmax(-1)[..., : assignment.shape[-1]] if self._softmax else None
        return Decoded(logits, found, scores, assignment, gates, assigned)

    def _add(self, block: nn.Module, residual: float, skip: float) -> None:
        assert isinstance(block, Block)
        attention, moe = block.attention, block.moe
        dense = block.feed_forward if moe is None else moe.shared
        gate = None if dense is None or dense.gate is None else dense.gate.weight
        feed_forward = [] if dense is None else _weights(dense.up.weight, gate, dense.down.weight)
        experts, router, cutoffs, bias, chosen = [], None, None, None, 0
        if moe is not None:
            experts = _weights(moe.experts.up, moe.experts.gate, moe.experts.down)
            router = moe.router.weight.float()
            thresholds, top = moe.router.thresholds(), moe.router.rule.biased_top_k(moe.router.state)
            if thresholds is not None:
                cutoffs = torch.full_like(thresholds, torch.inf).repeat(self._rows, 1)
                self._thresholds[block.layer] = cutoffs
            else:
                assert top is not None, "see kernel_of"
                bias, chosen = top
        qkv, output = attention.joined(), attention.output.weight
        decoder_add_layer(
            self._decoder,
            qkv=qkv,
            output=output,
            values=None if attention.value_embed is None else attention.value_embed.weight.float(),
            values_gate=None if attention.value_gate is None else attention.value_gate.weight,
            window=self._capacity if attention.window is None else attention.window,
            residual=residual,
            skip=skip,
            dense=feed_forward,
            experts=experts,
            router=router,
            cutoffs=cutoffs,
            bias=bias,
            chosen=chosen,
            softmax_gates=self._softmax,
            divide_by_fanout=moe is not None and moe.gate_norm == "fanout",
        )
        used = (qkv, output, *feed_forward, *experts)
        self._work += sum(math.prod(weight.shape[-2:]) for weight in used)


def _numbers(scalars: Tensor | None, count: int, without: float) -> list[float]:
    """Return the trunk's scalars or, if it has none, `count` copies of `without`, which has no effect."""
    numbers: list[float] = [without] * count if scalars is None else scalars.tolist()
    return numbers


def _weights(up: Tensor, gate: Tensor | None, down: Tensor) -> list[Tensor]:
    return [up, down] if gate is None else [up, down, gate]


def kernel_of(model: GPT, cache: Cache) -> Kernel | None:
    """Return the kernel for a snapshot of a model, or None if it does not apply. It requires float32 or bfloat16 on a
    CPU, a C++ compiler, a model without adapters, and a rule that has sigmoid or softmax gates and selects experts by
    thresholds or by a biased top k. Kernels must not be forbidden.
    """
    if cache.held.device.type != "cpu" or cache.held.dtype not in (torch.float32, torch.bfloat16) or model.adapted:
        return None
    known = all(_knows(moe.router) for _, moe in model.moe_layers())
    return Kernel(model, cache) if library() is not None and known else None


def _knows(router: Router) -> bool:
    decides = router.thresholds() is not None or router.rule.biased_top_k(router.state) is not None
    return decides and (router.rule.sigmoid_gates or router.rule.softmax_gates)


def library() -> ctypes.CDLL | None:
    """Return the library of the decoder's kernels, or None if they are forbidden or cannot be built."""
    return None if forbidden() else decode.decoder()

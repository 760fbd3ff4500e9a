"""The forward pass of a trained model for a few tokens at a time, each appended to its own sequence.

With so few tokens, launching an operation costs more than its arithmetic, so the forward uses as few operations as
possible. Where a compiler is available, all of them are one (`kernel.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model import GPT
from ..model.attention import Attention, rotary
from ..model.gpt import Block
from ..moe.router import route_behind
from .kernel import kernel_of

PREFILL = 256
"""Prompt tokens per forward; bounds the memory of masks and logits."""

FEW = 64
"""Up to this many tokens of one row, the kernel is faster than matrix products."""

Attend = Callable[[int, Tensor], Tensor]
"""Takes a layer's index and the tokens' queries, keys and values (tokens, heads + 2 · kv_heads, head_dim); returns the
output of attention (tokens, heads, head_dim)."""


class Routed(NamedTuple):
    """The routing of tokens: scores (tokens, num_scores), boolean assignment and gates (tokens, experts) of one
    layer, or of all layers stacked (layers, tokens, …). The kernel leaves gates None: its gates are σ(scores).
    """

    scores: Tensor
    assignment: Tensor
    gates: Tensor | None


class Peak(NamedTuple):
    """The index of the highest logit, its value, and log Σ exp(logit)."""

    likeliest: int
    highest: float
    logsumexp: float


class Decoded(NamedTuple):
    """logits: (tokens, vocab), float32. peaks: one per row of logits. routed: the routing of all MoE layers. assigned:
    token-expert pairs in total.
    """

    logits: Tensor
    peaks: list[Peak]
    routed: Routed
    assigned: int

    @classmethod
    def of(cls, logits: Tensor, routed: Sequence[Routed]) -> Decoded:
        """Build the record from logits and the routing of each layer."""
        highest, likeliest = logits.max(-1)
        peaks = list(map(Peak, likeliest.tolist(), highest.tolist(), logits.logsumexp(-1).tolist()))
        if not routed:
            nothing = logits.new_empty(0, len(logits), 0)
            return cls(logits, peaks, Routed(nothing, nothing.bool(), nothing), 0)
        stacked = Routed(*map(torch.stack, zip(*routed, strict=True)))
        return cls(logits, peaks, stacked, int(stacked.assignment.sum()))


class Decoder:
    """Computes what `GPT.forward` does, without gradients, with a cache in which every sequence has its own row.

    Uses a snapshot of the model's weights and cutoffs, in its compute dtype. rows: sequences at once; capacity: tokens
    per row. strict: a sequence gets the same bits alone and in company. The kernel always guarantees that. Without the
    kernel, a strict step computes row by row, so that products have the same shapes whoever shares the batch; otherwise
    rounding depends on the number of rows and on how threads divide them.
    """

    def __init__(self, model: GPT, rows: int, capacity: int, *, strict: bool = False) -> None:
        config = model.config
        # A rule that looks at earlier tokens would see rows that take part in a product only to fill its shape.
        looks_back = config.rule is not None and config.rule.scope(training=False) != "token"
        self.rows, self.capacity, self.strict = rows, capacity, strict or looks_back
        self.softcap, self.heads, self.kv_heads = config.softcap, config.heads, config.kv_heads
        self.dtype, self.device = model.compute_dtype, model.embed.weight.device
        self.embed, self.head = model.embed.weight.detach(), model.head.weight.detach().to(self.dtype).T
        self.layers = [Layer(model, layer, rows) for layer in range(config.layers)]
        self.lengths = [0] * rows
        head_dim = config.d_model // config.heads
        shape = (config.layers, rows, capacity, 2, config.kv_heads, head_dim)
        self.cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.places = torch.arange(capacity, device=self.device)
        cos, sin = rotary(self.places.float(), head_dim)
        self.turns = torch.complex(cos, -sin)[:, None]
        self.eps = torch.tensor(torch.finfo(torch.float32).eps, device=self.device)
        self.kernel = kernel_of(self)

    def open(self, row: int, rate: float | None = None) -> None:
        """Begin an empty sequence in a row. rate: routed experts per token for this row; None is the model's rate."""
        self.lengths[row] = 0
        for layer in self.layers:
            layer.open(row, rate)

    def close(self, row: int) -> None:
        """End a row's sequence. The row may still take part in products but exceeds no cutoff and reaches no expert."""
        self.lengths[row] = 0
        for layer in self.layers:
            layer.close(row)

    @torch.inference_mode()
    def read(self, row: int, tokens: Sequence[int], *, every: bool = False) -> Decoded:
        """Append up to PREFILL tokens to a row's sequence; returns the logits of the last token, or of every one."""
        start, count = self.lengths[row], len(tokens)
        end = start + count
        assert 0 < count <= PREFILL, f"{count} tokens at once"
        assert end <= self.capacity, f"{end} tokens in a row of {self.capacity}"
        if self.kernel is not None and count <= FEW:
            return self._run([row] * count, tokens, range(start, end), 0 if every else count - 1)
        mask = self._mask(self.places[start:end], end) if start > 0 else None

        def attend(layer: int, heads: Tensor) -> Tensor:
            self.cache[layer, row, start:end] = heads[:, self.heads :].unflatten(1, (2, -1))
            k, v = self.cache[layer, row, :end].permute(1, 2, 0, 3)[:, None]
            return self._attention(heads[:, : self.heads].transpose(0, 1)[None], k, v, mask)[0].transpose(0, 1)

        x, routed = self._forward(tokens, self.places[start:end], row, attend)
        self.lengths[row] = end
        return Decoded.of(self._logits(x if every else x[-1:]), routed)

    def step(self, tokens: Mapping[int, int]) -> Decoded:
        """Append one token to the sequence of each given row; the result has one row for each, in ascending order."""
        rows = sorted(tokens)
        longest = max(self.lengths[row] for row in rows) + 1
        assert longest <= self.capacity, f"{longest} tokens in a row of {self.capacity}"
        if self.kernel is not None:
            return self._run(rows, [tokens[row] for row in rows], [self.lengths[row] for row in rows])
        if not self.strict:
            return self._step(rows, tokens)
        decoded = [self._step([row], tokens) for row in rows]
        logits, peaks, routed, assigned = zip(*decoded, strict=True)
        together = Routed(*(torch.cat(parts, 1) for parts in zip(*routed, strict=True)))
        return Decoded(torch.cat(logits), [peak for of_row in peaks for peak in of_row], together, sum(assigned))

    def _run(self, rows: Sequence[int], tokens: Sequence[int], places: Sequence[int], first: int = 0) -> Decoded:
        """Run the kernel; a row may have several tokens. Returns results for the tokens from `first` on."""
        assert self.kernel is not None
        results = self.kernel(tokens, rows, places, first)
        for row in rows:
            self.lengths[row] += 1
        peaks = list(map(Peak, results.likeliest, results.highest, results.logsumexp))
        return Decoded(results.logits, peaks, Routed(results.scores, results.assignment, None), results.assigned)

    @torch.inference_mode()
    def _step(self, rows: list[int], tokens: Mapping[int, int]) -> Decoded:
        """Every row from the first to the last of `rows` takes part in the products."""
        among = range(rows[0], rows[-1] + 1)
        lengths = self.lengths[among.start : among.stop]
        longest = max(self.lengths[row] for row in rows) + 1
        positions = torch.tensor(lengths, device=self.device)
        places = positions + torch.tensor(among, device=self.device) * self.capacity
        mask = None
        if any(length + 1 != longest for length in lengths):
            mask = self._mask(positions, longest)[:, None, None]
        keys, values = self.cache[:, among.start : among.stop, :longest].permute(3, 0, 1, 4, 2, 5)
        flat = self.cache.view(len(self.layers), -1, *self.cache.shape[3:])
        taken = None
        if len(rows) < len(among):
            taken = torch.tensor(rows, device=self.device) - among.start
            places = places[taken]

        def attend(layer: int, heads: Tensor) -> Tensor:
            new = heads[:, self.heads :].unflatten(1, (2, -1))
            flat[layer].index_copy_(0, places, new if taken is None else new[taken])
            return self._attention(heads[:, : self.heads, None], keys[layer], values[layer], mask)[:, :, 0]

        inputs = [tokens.get(row, 0) for row in among]
        x, routed = self._forward(inputs, positions, slice(among.start, among.stop), attend)
        for row in rows:
            self.lengths[row] += 1
        if taken is None:
            return Decoded.of(self._logits(x), routed)
        kept = [
            Routed(r.scores[taken], r.assignment[taken], None if r.gates is None else r.gates[taken]) for r in routed
        ]
        return Decoded.of(self._logits(x[taken]), kept)

    def _mask(self, positions: Tensor, seen: int) -> Tensor:
        """Return the additive mask (tokens, seen): 0 where a position attends to a place in its row, −∞ elsewhere."""
        mask = torch.zeros(len(positions), seen, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(self.places[:seen] > positions[:, None], -torch.inf)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Without a mask, a single token attends to everything, and several tokens attend causally."""
        causal = mask is None and q.shape[2] > 1
        grouped = self.heads != self.kv_heads
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    def _forward(
        self, tokens: Sequence[int], positions: Tensor, rows: int | slice, attend: Attend
    ) -> tuple[Tensor, list[Routed]]:
        """Return the normalized output of the last layer, and the routing of each MoE layer."""
        x = self._norm(self.embed[torch.tensor(tokens, device=self.device)].to(self.dtype))
        turns = self.turns[positions]
        routed = []
        for i, layer in enumerate(self.layers):
            heads = torch.mm(self._norm(x), layer.qkv).view(len(x), -1, turns.shape[-1] * 2)
            turned = heads[:, : -self.kv_heads]
            pairs = torch.view_as_complex(turned.float().unflatten(-1, (-1, 2)))
            self._norm(torch.view_as_real(pairs * turns).flatten(-2), out=turned)
            x = torch.addmm(x, attend(i, heads).reshape(len(x), -1), layer.output)
            normed = self._norm(x)
            if layer.dense is not None:
                x = torch.addmm(x, hidden(normed, *layer.dense.ups), layer.dense.down)
            if layer.moe is not None:
                to, passthrough = layer.route(normed, rows)
                layer.add_experts(x, normed, to, passthrough)
                routed.append(to)
        return self._norm(x), routed

    def _norm(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Parameter-free RMSNorm over the last dimension, in half as many operations as `rms_norm`."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self.eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return torch.mul(x, scale, out=torch.empty_like(x) if out is None else out)

    def _logits(self, x: Tensor) -> Tensor:
        logits = torch.mm(x, self.head).float()
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)


def hidden(x: Tensor, up: Tensor, gate: Tensor | None = None) -> Tensor:
    """relu(up · x)², or silu(gate · x) · (up · x)."""
    h = torch.mm(x, up)
    return h.relu_().mul_(h) if gate is None else F.silu(torch.mm(x, gate)).mul_(h)


class FeedForward(NamedTuple):
    """Weights, (in, out) each."""

    down: Tensor
    ups: list[Tensor]  # up, or up and gate


class Layer:
    """One block's weights in the compute dtype, and the routing state of each row of the cache."""

    def __init__(self, model: GPT, index: int, rows: int) -> None:
        block, dtype = model.blocks[index], model.compute_dtype
        assert isinstance(block, Block)

        def transposed(*weights: Tensor | None) -> list[Tensor]:
            return [weight.detach().to(dtype).mT for weight in weights if weight is not None]

        self.qkv, self.output = transposed(_pair_up(block.attention), block.attention.output.weight)
        dense = block.feed_forward if block.moe is None else block.moe.shared
        self.dense: FeedForward | None = None
        if dense is not None:
            gate = None if dense.gate is None else dense.gate.weight
            down, *ups = transposed(dense.down.weight, dense.up.weight, gate)
            self.dense = FeedForward(down, ups)
        self.moe = block.moe
        self.stacked: FeedForward | None = None  # (experts, in, out)
        self.experts: list[FeedForward] = []
        self.cutoffs: Tensor | None = None  # (rows, experts), where a comparison decides alone
        self.states: list[Any] = []  # the rule's state for each row
        self.earlier: list[Tensor | None] = [None] * rows  # each row's earlier scores, if the rule needs them
        if block.moe is not None:
            router = block.moe.router
            experts, rule = block.moe.experts, router.rule
            cutoff = router.thresholds() if rule.sigmoid_gates else None
            self.states = [router.state_at(router.rate)] * rows
            down, *ups = transposed(experts.down, experts.up, experts.gate)
            self.stacked = FeedForward(down, ups)
            of_each = zip(*(up.unbind() for up in ups), strict=True)
            self.experts = [FeedForward(d, list(u)) for d, u in zip(down.unbind(), of_each, strict=True)]
            self.cutoffs = None if cutoff is None else torch.full_like(cutoff, torch.inf).repeat(rows, 1)

    def of_a_token(self) -> list[Tensor]:
        """Return the weights that a token uses when it goes to one expert."""
        parts = [part for part in (self.dense, *self.experts[:1]) if part is not None]
        return [self.qkv, self.output, *(weight for part in parts for weight in (part.down, *part.ups))]

    def open(self, row: int, rate: float | None) -> None:
        if self.moe is None:
            return
        router = self.moe.router
        self.states[row] = router.state_at(router.rate if rate is None else rate)
        self.earlier[row] = None
        if self.cutoffs is not None:
            cutoff = router.rule.thresholds(self.states[row])
            assert cutoff is not None
            self.cutoffs[row] = cutoff

    def close(self, row: int) -> None:
        self.earlier[row] = None
        if self.cutoffs is not None:
            self.cutoffs[row] = torch.inf

    def route(self, x: Tensor, rows: int | slice) -> tuple[Routed, Tensor | None]:
        """Route x (tokens, d_model): one token of each row, or several of one row. The second result multiplies x."""
        assert self.moe is not None
        router = self.moe.router
        scores = F.linear(x.float(), router.weight.float())
        if self.cutoffs is not None:
            return Routed(scores, scores > self.cutoffs[rows], scores.sigmoid()), None
        if isinstance(rows, int):
            return self._route_row(rows, scores)
        states = self.states[rows]
        if router.rule.scope(training=False) == "token" and all(map(_same, states, states[:1] * len(states))):
            return self._route_row(rows.start, scores)
        each = [self._route_row(row, scores[i : i + 1]) for i, row in enumerate(range(rows.start, rows.stop))]
        routed = Routed(*(torch.cat(parts) for parts in zip(*(one for one, _ in each), strict=True)))
        passed = [passthrough for _, passthrough in each if passthrough is not None]
        return routed, torch.cat(passed) if passed else None

    def _route_row(self, row: int, scores: Tensor) -> tuple[Routed, Tensor | None]:
        """Route scores (tokens, num_scores) that follow the earlier tokens of one row."""
        assert self.moe is not None
        rule, earlier = self.moe.router.rule, self.earlier[row]
        routing = route_behind(rule, scores[None], self.states[row], earlier)
        if rule.scope(training=False) != "token":
            self.earlier[row] = scores[None] if earlier is None else torch.cat((earlier, scores[None]), 1)
        experts = rule.num_experts
        routed = Routed(scores, routing.assignment[0, :, :experts], routing.gates[0, :, :experts])
        return routed, None if routing.passthrough is None else routing.passthrough[0]

    def add_experts(self, total: Tensor, x: Tensor, routed: Routed, passthrough: Tensor | None) -> None:
        """Add Σ_i z[t,i] · g[t,i] · expert_i(x_t) to `total`, which is shaped like x (tokens, d_model)."""
        assert self.moe is not None
        assert routed.gates is not None
        gates, taken = self.moe.weights(routed.gates, routed.assignment).T, routed.assignment.T
        loads = taken.sum(1).tolist()
        hit = [i for i, load in enumerate(loads) if load]
        if hit:
            tokens = taken.nonzero()[:, 1]
            parts = x[tokens].split([loads[i] for i in hit])
            each = zip((self.experts[i] for i in hit), parts, strict=True)
            y = torch.cat([torch.mm(hidden(part, *expert.ups), expert.down) for expert, part in each])
            total.index_add_(0, tokens, y.mul_(gates[taken][:, None]))
        if passthrough is not None:
            total.addcmul_(passthrough[:, None].to(x.dtype), x)


def _same(a: Any, b: Any) -> bool:
    """Return True if two states hold the same tensors; reading a router's state makes a new record each time."""
    return all(x is y for x, y in zip(a, b, strict=True))


def _pair_up(attention: Attention) -> Tensor:
    """Return the query, key and value weights as one matrix, permuted so that the two numbers that a rotation mixes are
    adjacent and form one complex number. Products of queries and keys, and their norms, do not change.
    """
    weights = []
    for projection in (attention.query, attention.key):
        halves = projection.weight.unflatten(0, (-1, 2, attention.head_dim // 2))
        weights.append(halves.transpose(1, 2).flatten(0, 2))
    return torch.cat([*weights, attention.value.weight])

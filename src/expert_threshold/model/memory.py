"""How many bytes a training step needs, counted from the shapes that forward keeps for backward; no tensor is made.

It follows attention.py, experts.py, grouped.py, static.py and cross_entropy.py, and those of kernels/cpu/ where this
machine takes its kernels: whoever changes what those keep changes it here. tests/test_plan.py compares it with the
allocator's own count. What each thread keeps for native kernels is past the allocator and not counted: the two packed
matrices of its widest feed-forward, 256 rows of them, and 64 of the vocabulary, so tens of megabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..kernels.activation import activation_named
from ..kernels.cpu import FEWEST_ROWS, TILE, available
from ..kernels.cpu import cross_entropy as loss
from ..kernels.cpu.experts import MOST_WEIGHTS
from ..moe.backends.grouped import round_up
from ..moe.experts import HIDDEN_PER_BLOCK
from .attention import QUERIES_PER_BLOCK
from .cross_entropy import LOGITS_PER_CHUNK
from .gpt import GPTConfig

FLOAT32, INT32, INT64 = 4, 4, 8  # bytes


class Memory(NamedTuple):
    """Bytes. dispatch: what is kept and made because tokens go to experts and come back. casts: weights in the compute
    dtype, which are kept for backward, too."""

    activations: int = 0
    dispatch: int = 0
    logits: int = 0
    casts: int = 0
    gradients: int = 0

    def __add__(self, other: Memory) -> Memory:  # type: ignore[override]
        return Memory(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def total(self) -> int:
        return sum(self)


class Step(NamedTuple):
    """A micro-batch on one device, a GPU or a CPU. itemsize: bytes of a number of the compute dtype. ranks: that share
    a global pool."""

    config: GPTConfig
    sequences: int
    itemsize: int
    gpu: bool
    ranks: int = 1

    def native(self, *sizes: int) -> bool:
        """Whether the processor's own kernels are taken for matrices of such sizes."""
        tiles = all(size % TILE == 0 for size in sizes)
        return not self.gpu and self.itemsize < FLOAT32 and tiles and available()

    def native_feed_forward(self, hidden: int) -> bool:
        """Whether they compute feed-forwards of that hidden width, as kernels/cpu/experts.py decides."""
        fits = self.tokens >= FEWEST_ROWS and self.config.d_model * hidden <= MOST_WEIGHTS
        return fits and self.config.activation == "relu2" and self.native(self.config.d_model, hidden)

    @property
    def native_experts(self) -> bool:
        """Whether they compute the routed ones, and those that are shared at once with them."""
        return self.dispatch == "cpu" and self._kernels_fit

    @property
    def _kernels_fit(self) -> bool:
        widths = self.config.d_expert, self.config.d_expert * max(self.config.shared_experts, 1)
        return all(map(self.native_feed_forward, widths))

    @property
    def fused(self) -> bool:
        """Whether attention is torch's, which keeps no probabilities either."""
        return self.gpu or self.itemsize == FLOAT32

    @property
    def widens_products(self) -> bool:
        """Returns True if oneDNN makes bfloat16 products in float32: with AVX-512 but without bfloat16 instructions."""
        has = torch.cpu.get_capabilities()
        emulated = has.get("avx512_f", False) and not has.get("avx512_bf16", False)
        return not self.gpu and self.itemsize < FLOAT32 and emulated

    @property
    def tokens(self) -> int:
        return self.sequences * self.config.context

    @property
    def rows(self) -> int:
        """A vector of d_model for each token."""
        return self.tokens * self.config.d_model * self.itemsize

    @property
    def scale(self) -> int:
        """A float32 for each token."""
        return self.tokens * FLOAT32

    @property
    def width(self) -> int:
        return activation_named(self.config.activation).width

    @property
    def most(self) -> int | None:
        """As many pairs of a token and an expert as the rule's bounds allow; None where there are none."""
        assert self.config.rule is not None
        return self.config.rule.max_pairs(self.tokens, training=True, ranks=self.ranks)

    @property
    def dispatch(self) -> str:
        """Return the backend of the experts; what `auto` takes on a GPU of compute capability 9.0 or more, or a CPU."""
        if self.config.dispatch != "auto":
            return self.config.dispatch
        if self._kernels_fit:
            return "cpu"
        native = self.gpu and self.itemsize < FLOAT32 and self.config.d_model % 8 == 0 == self.config.d_expert % 8
        return "static" if native and self.most is not None else "grouped"

    @property
    def slots(self) -> int:
        """Rows of the experts' buffers, padding included: as many as the rule's bounds allow where shapes do not follow
        from loads, else as many as there are at even loads."""
        rule = self.config.rule
        assert rule is not None
        if self.most is not None and self.dispatch in ("static", "triton"):
            return self.most
        return rule.num_experts * (self.load if self.native_experts else round_up(self.load))

    @property
    def load(self) -> int:
        """Rows of an expert at even loads, at least one."""
        rule = self.config.rule
        assert rule is not None
        return max(round(self.tokens * rule.experts_per_token / rule.num_experts), 1)

    def has_experts(self, layer: int) -> bool:
        return self.config.rule is not None and layer >= self.config.dense_layers

    def cast(self, weights: int) -> int:
        """So many weights; none where they are float32 already."""
        return 0 if self.itemsize == FLOAT32 else weights * self.itemsize

    def kept(self, layer: int) -> Memory:
        """Of a block, from its forward to its backward."""
        return self._kept_by_attention() + (self._kept_by_experts() if self.has_experts(layer) else self._kept_dense())

    def _kept_by_attention(self) -> Memory:
        config = self.config
        heads, kv_heads, wide = config.heads, config.kv_heads, config.d_model // config.heads
        head = self.tokens * wide * self.itemsize
        # Two norms' inputs; what the projections take, what they make; what the last one takes.
        kept = 3 * self.rows + (heads + 2 * kv_heads) * head + heads * head
        native = self.native(wide)
        if not native:  # the rows' scales
            kept += (2 + heads + kv_heads) * self.scale
        if native or self.fused:  # a number for each query
            kept += heads * self.scale
        if self.fused:
            kept += (heads + kv_heads) * head
        elif not native:
            seen = sum(
                min(QUERIES_PER_BLOCK, config.context - start) * min(start + QUERIES_PER_BLOCK, config.context)
                for start in range(0, config.context, QUERIES_PER_BLOCK)
            )
            kept += 3 * heads * head + self.sequences * heads * seen * self.itemsize
        weights = (heads + 2 * kv_heads) * wide * config.d_model * self.itemsize  # put together, so a copy always
        return Memory(kept, casts=weights + self.cast(heads * wide * config.d_model))

    def _kept_dense(self) -> Memory:
        hidden = self.tokens * self.config.d_feed_forward * self.width * self.itemsize
        weights = (self.width + 1) * self.config.d_model * self.config.d_feed_forward
        return Memory(self.rows + hidden, casts=self.cast(weights))

    def _kept_by_experts(self) -> Memory:
        config, rule = self.config, self.config.rule
        assert rule is not None
        wide = config.d_expert * self.width * self.itemsize
        pairs = self.slots
        gates = self.scale * rule.num_experts
        indices = 0 if self.native_experts else INT64 * (4 * pairs + self.slots + self.tokens)
        weights = (self.width + 1) * config.d_model * config.d_expert * (rule.num_experts + config.shared_experts)
        shared = self.tokens * config.shared_experts * wide
        return Memory(self.rows + shared, gates + indices + self.slots * wide, casts=self.cast(weights))

    def kept_outside(self) -> Memory:
        """Of all blocks: what the first norm and the last one take, and the loss's gradients."""
        head = self.config.vocab_size * self.config.d_model
        return Memory(3 * self.rows + 2 * self.scale, logits=head * FLOAT32)

    def made_by_loss(self) -> Memory:
        """While the loss is computed: the last hidden states, the head in the compute dtype and a product for its
        gradient, a chunk of logits; and scores and assignments, which are held until the forward is over."""
        vocab, head = self.config.vocab_size, self.config.vocab_size * self.config.d_model
        if self.native(vocab, self.config.d_model) and self.config.softcap is not None:
            rows = min(max(loss.NUMBERS_PER_CHUNK // vocab // loss.GROUP, 1) * loss.GROUP, self.tokens)
            chunk, product = rows * (vocab + self.config.d_model) * self.itemsize, 2 * head * self.itemsize
        else:
            rows = min(max(LOGITS_PER_CHUNK["gpu" if self.gpu else "cpu"] // vocab, 1), self.tokens)
            chunk = rows * vocab * (self.itemsize + (4 if self.widens_products else 3) * FLOAT32)
            product = head * self.itemsize + (head * FLOAT32 if self.itemsize < FLOAT32 else 0)  # widened, to be added
        scores = 0 if self.config.rule is None else self.config.rule.num_scores
        layers = sum(self.has_experts(layer) for layer in range(self.config.layers))
        held = layers * self.tokens * scores * (FLOAT32 + 1)
        return Memory(self.rows, held, chunk + product + head * self.itemsize)

    def made_by_backward(self, layer: int) -> Memory:
        """While a block's feed-forward is in work, beside what is kept."""
        config = self.config
        if not self.has_experts(layer):
            if self.native_feed_forward(config.d_feed_forward):
                return self._made_natively(config.d_feed_forward)
            weights = 2 * (self.width + 1) * config.d_model * config.d_feed_forward
            hidden = min(HIDDEN_PER_BLOCK, self.tokens * config.d_feed_forward)
            return Memory(3 * self.rows + (weights + hidden) * self.itemsize)
        assert config.rule is not None
        if self.native_experts:
            return self._made_natively(config.shared_experts * config.d_expert, routed=True)
        weights = (self.width + 1) * config.d_model * config.d_expert * config.rule.num_experts
        hidden = 3 * min(HIDDEN_PER_BLOCK, self.slots * config.d_expert) * self.itemsize
        rows = 4 * self.slots * config.d_model * self.itemsize
        return Memory(3 * self.rows, rows + hidden + self.cast(weights))

    def _made_natively(self, hidden: int, *, routed: bool = False) -> Memory:
        """By the backward of kernels/cpu/experts.py, which needs more than its forward: gradients in the compute dtype,
        and what those of weights are made of, whole.

        hidden: width of what every token goes to. routed: experts, too; there is room for both at once.
        """
        activations, dispatch, weights = 2 * self.rows + self._room(self.tokens, hidden), 0, hidden
        if routed:
            config, rule = self.config, self.config.rule
            assert rule is not None
            order = INT32 * (2 * self.slots + self.tokens)
            rows = self.slots * config.d_model * self.itemsize
            room = rule.num_experts * self._room(self.load, config.d_expert)
            dispatch = rule.num_experts * self.scale + order + rows + room
            weights += rule.num_experts * config.d_expert
        return Memory(activations, dispatch, casts=self.cast(2 * weights * self.config.d_model))

    def _room(self, rows: int, hidden: int) -> int:
        """Two copies of whole tiles of rows, and of their hidden activations; none where nothing is hidden."""
        tiles = -(-rows // TILE) * TILE
        return 2 * tiles * (hidden + self.config.d_model) * self.itemsize if hidden else 0

    def made_by_attention(self) -> Memory:
        """While the backward of a block's attention is in work; its feed-forward's is over."""
        config = self.config
        none = self.fused or self.native(config.d_model // config.heads)
        block = 0 if none else 2 * min(QUERIES_PER_BLOCK, config.context) * config.context
        return Memory(5 * self.rows + self.sequences * config.heads * block * self.itemsize)

    def peak(self, gradients: Sequence[int], *, accumulated: bool, checkpointing: bool) -> Memory:
        """The moment of forward and backward that needs most, weights and the optimizer's state not counted.

        gradients: bytes of those of embedding and head together, and of each block. accumulated: those of an earlier
        micro-batch are there already.
        """
        blocks = range(self.config.layers)
        kept = [self.kept(layer) for layer in blocks]
        waiting = [Memory(self.rows)] * len(kept) if checkpointing else kept
        there = sum(gradients) if accumulated else 0
        moments = [
            sum(waiting, self.kept_outside() + self.made_by_loss() + Memory(gradients=there)),
            Memory(gradients=there + sum(gradients)),
        ]
        made = there + gradients[0] // 2  # the head's
        for layer in reversed(blocks):
            below = sum(waiting[:layer], Memory(gradients=made))
            made += gradients[1 + layer]
            moments.append(below + kept[layer] + self.made_by_backward(layer))
            then = below._replace(gradients=made) + self._kept_by_attention() + self.made_by_attention()
            moments.append(then)
        return max(moments, key=lambda moment: moment.total)

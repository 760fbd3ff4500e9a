"""A step of decoding in C++ (`kernels/cpu/decode.cpp`), all in one call."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, addressof, byref, c_double, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import cpu, switched_off
from ..model import GPT, Cache
from ..model.attention import rotary
from ..model.gpt import Block
from ..moe import Past, Router
from .accelerator import Accelerator, Decoded, Peak

SHARED = 2**19
"""Multiplications above which threads share the work; below, synchronizing them costs more than it saves."""


class _FeedForward(Structure):
    _fields_ = (("up", c_void_p), ("gate", c_void_p), ("down", c_void_p), ("hidden", c_int64))


class _Layer(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "output")),
        *((name, _FeedForward) for name in ("dense", "expert")),
        *((name, c_void_p) for name in ("router", "cutoffs", "bias")),
        *((name, c_int64) for name in ("experts", "chosen", "divide_by_fanout")),
    )


class _Model(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("bfloat16", "layers", "d_model", "heads", "kv_heads", "head_dim", "vocab")),
        *((name, c_int64) for name in ("rows", "capacity")),
        *((name, c_void_p) for name in ("embed", "head", "cos", "sin", "cache")),
        *((name, c_float) for name in ("eps", "softcap")),
        ("layer", POINTER(_Layer)),
    )


class _Tokens(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("count", "first")),
        *((name, c_void_p) for name in ("ids", "rows", "places")),
    )


class _Results(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "likeliest", "highest", "logsumexp", "scores", "assignment")),
        ("assigned", c_int64),
    )


class Kernel:
    """Holds the addresses of a model's weights, of the thresholds of each row, and of a cache."""

    most = 64

    def __init__(self, model: GPT, cache: Cache, kernels: ctypes.CDLL) -> None:
        config = model.config
        self._scratch_of, self._run = kernels.decode_scratch, kernels.decode_forward
        self._kept: list[object] = []  # keeps the tensors behind the addresses alive
        self._vocab, self._rows = config.vocab_size, len(cache.lengths)
        self._moes = len(model.moe_layers())
        self._thresholds: dict[int, Tensor] = {}  # (rows, experts), by layer
        self._experts = 0 if config.rule is None else config.rule.num_experts
        self._work = config.vocab_size * config.d_model  # multiplications for a token that goes to one expert
        layers = (_Layer * config.layers)(*map(self._layer, model.blocks))
        cos, sin = rotary(torch.arange(cache.capacity, dtype=torch.float32, device="cpu"), cache.held.shape[-1])
        self._model = _Model(
            cache.held.dtype == torch.bfloat16,
            config.layers,
            config.d_model,
            config.heads,
            config.kv_heads,
            cache.held.shape[-1],
            config.vocab_size,
            self._rows,
            cache.capacity,
            self._address(model.embed.weight.float()),
            self._address(model.head.weight),
            self._address(cos),
            self._address(sin),
            self._address(cache.held),
            torch.finfo(torch.float32).eps,
            config.softcap or 0,
            layers,
        )
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    def begin(self, row: int, pasts: Mapping[int, Past]) -> None:
        for layer, thresholds in self._thresholds.items():
            past = pasts[layer].thresholds
            assert past is not None
            thresholds[row] = past

    def append(self, rows: Sequence[int], tokens: Sequence[int], places: Sequence[int], first: int = 0) -> Decoded:
        count, asked = len(tokens), len(tokens) - first
        if not 0 <= min(tokens) <= max(tokens) < self._vocab:
            raise IndexError(f"token ids {min(tokens)} to {max(tokens)} must lie from 0 to {self._vocab - 1}")
        logits = torch.empty(asked, self._vocab, dtype=torch.float32, device="cpu")
        scores = torch.empty(self._moes, count, self._experts, dtype=torch.float32, device="cpu")
        assignment = torch.empty(scores.shape, dtype=torch.bool, device="cpu")
        peaks: tuple[Any, ...] = ((c_int64 * asked)(), (c_float * asked)(), (c_float * asked)())
        results = _Results(logits.data_ptr(), *map(addressof, peaks), scores.data_ptr(), assignment.data_ptr())
        needed = self._scratch_of(byref(self._model), c_int64(count))
        if self._scratch.numel() < needed:
            self._scratch = self._scratch.new_empty(needed)
        columns = [(c_int64 * count)(*column) for column in (tokens, rows, places)]
        given = _Tokens(count, first, *map(addressof, columns))
        threads = torch.get_num_threads() if count * self._work >= SHARED else 1
        scratch = c_void_p(self._scratch.data_ptr())
        self._run(byref(self._model), byref(given), byref(results), c_int64(threads), scratch)
        return Decoded(logits, list(map(Peak, *peaks)), scores, assignment, None, results.assigned)

    def _address(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _feed_forward(self, up: Tensor, gate: Tensor | None, down: Tensor) -> _FeedForward:
        self._work += sum(math.prod(weight.shape[-2:]) for weight in (up, gate, down) if weight is not None)
        return _FeedForward(self._address(up), self._address(gate), self._address(down), down.shape[-1])

    def _layer(self, block: nn.Module) -> _Layer:
        assert isinstance(block, Block)
        attention, moe = block.attention, block.moe
        qkv = attention.joined()
        self._work += qkv.numel() + attention.output.weight.numel()
        layer = _Layer(self._address(qkv), self._address(attention.output.weight))
        dense = block.feed_forward if moe is None else moe.shared
        if dense is not None:
            gate = None if dense.gate is None else dense.gate.weight
            layer.dense = self._feed_forward(dense.up.weight, gate, dense.down.weight)
        if moe is not None:
            experts, router = moe.experts, moe.router
            layer.expert = self._feed_forward(experts.up, experts.gate, experts.down)
            layer.router = self._address(router.weight.float())
            layer.experts, layer.divide_by_fanout = self._experts, moe.gate_norm == "fanout"
            thresholds, top = router.thresholds(), router.rule.biased_top_k(router.state)
            if thresholds is not None:
                self._thresholds[block.layer] = torch.full_like(thresholds, torch.inf).repeat(self._rows, 1)
                layer.cutoffs = self._address(self._thresholds[block.layer])
            else:
                assert top is not None, "see kernel_of"
                layer.bias, layer.chosen = self._address(top[0]), top[1]
        return layer


def kernel_of(model: GPT, cache: Cache) -> Accelerator | None:
    """Return the kernel for a snapshot of a model, or None where it does not apply: on another device or dtype, without
    a compiler or switched off, unless the rule has sigmoid gates and either thresholds or a biased top k, or for
    another trunk than the paper's.
    """
    if model.config.beyond_the_paper():
        return None
    if cache.held.device.type != "cpu" or cache.held.dtype not in (torch.float32, torch.bfloat16):
        return None
    kernels = library()
    known = all(_knows(moe.router) for _, moe in model.moe_layers())
    return Kernel(model, cache, kernels) if kernels is not None and known else None


def _knows(router: Router) -> bool:
    decides = router.thresholds() is not None or router.rule.biased_top_k(router.state) is not None
    return router.rule.sigmoid_gates and decides


def sample(logits: Tensor, temperature: float, most: int, top_p: float, number: float) -> int | None:
    """Draw a token as `Sampler` does; returns -1 if a logit is NaN, None if the kernels are not available."""
    kernels = library()
    if kernels is None or not logits.is_cpu or logits.dtype != torch.float32:
        return None
    logits = logits.contiguous()
    return kernels.decode_sample(  # type: ignore[no-any-return]
        c_void_p(logits.data_ptr()),
        c_int64(len(logits)),
        c_double(temperature),
        c_int64(most),
        c_double(top_p),
        c_double(number),
    )


def library() -> ctypes.CDLL | None:
    """Return the decoder's kernels; None if they are switched off or cannot be built."""
    kernels = None if switched_off() else cpu.decoder()
    if kernels is not None:
        kernels.decode_scratch.restype = kernels.decode_sample.restype = c_int64
    return kernels

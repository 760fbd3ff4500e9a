"""The decoder's forward pass in C++ (`kernels/cpu/decode.cpp`), all in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, byref, c_double, c_float, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import cpu

if TYPE_CHECKING:
    from .decoder import Decoder, FeedForward, Layer


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
        *((name, c_void_p) for name in ("embed", "head", "turns", "cache")),
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


class Results:
    """Buffers for the fields of `Decoded`: `count` tokens, of which `asked` have logits."""

    def __init__(self, asked: int, vocab: int, layers: int, count: int, experts: int) -> None:
        self.logits = torch.empty(asked, vocab, dtype=torch.float32, device="cpu")
        self.scores = torch.empty(layers, count, experts, dtype=torch.float32, device="cpu")
        self.assignment = torch.empty(layers, count, experts, dtype=torch.bool, device="cpu")
        self.likeliest, self.highest, self.logsumexp = (c_int64 * asked)(), (c_float * asked)(), (c_float * asked)()
        self.assigned = 0


class Kernel:
    """Holds the addresses of the decoder's weights, cutoffs and cache."""

    def __init__(self, decoder: Decoder, kernels: ctypes.CDLL) -> None:
        self._scratch_of, self._run = kernels.decode_scratch, kernels.decode_forward
        self._kept: list[object] = []  # keeps the tensors behind the addresses alive
        self._vocab = decoder.head.shape[1]
        routed = [layer for layer in decoder.layers if layer.moe is not None]
        self._routed, self._experts = len(routed), len(routed[0].experts) if routed else 0
        self._layers = (_Layer * len(decoder.layers))(*map(self._layer, decoder.layers))
        self._model = _Model(
            decoder.dtype == torch.bfloat16,
            len(decoder.layers),
            decoder.embed.shape[1],
            decoder.heads,
            decoder.kv_heads,
            decoder.cache.shape[-1],
            self._vocab,
            decoder.rows,
            decoder.capacity,
            self._address(decoder.embed.float()),
            self._address(decoder.head.T),
            self._address(torch.view_as_real(decoder.turns)),
            self._address(decoder.cache),
            float(decoder.eps),
            decoder.softcap or 0,
            self._layers,
        )
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")
        weights = [w for layer in decoder.layers for w in layer.of_a_token()]
        self._work = sum(weight.numel() for weight in weights) + decoder.head.numel()

    def __call__(self, ids: Sequence[int], rows: Sequence[int], places: Sequence[int], first: int = 0) -> Results:
        """Run tokens at the given rows and places of the cache, those of one row in order; logits from `first` on.

        Raises IndexError if an id is not in the vocabulary.
        """
        count = len(ids)
        if not 0 <= min(ids) <= max(ids) < self._vocab:
            raise IndexError(f"token ids {min(ids)} to {max(ids)} must lie from 0 to {self._vocab - 1}")
        results = Results(count - first, self._vocab, self._routed, count, self._experts)
        needed = self._scratch_of(byref(self._model), c_int64(count))
        if self._scratch.numel() < needed:
            self._scratch = self._scratch.new_empty(needed)
        columns = [(c_int64 * count)(*column) for column in (ids, rows, places)]
        tokens = _Tokens(count, first, *(addressof(column) for column in columns))
        into = _Results(
            results.logits.data_ptr(),
            *(addressof(column) for column in (results.likeliest, results.highest, results.logsumexp)),
            results.scores.data_ptr(),
            results.assignment.data_ptr(),
        )
        threads = torch.get_num_threads() if count * self._work >= SHARED else 1
        scratch = c_void_p(self._scratch.data_ptr())
        self._run(byref(self._model), byref(tokens), byref(into), c_int64(threads), scratch)
        results.assigned = into.assigned
        return results

    def _address(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _feed_forward(self, weights: FeedForward | None) -> _FeedForward:
        if weights is None:
            return _FeedForward()
        up, *gate = (self._address(weight.mT) for weight in weights.ups)
        return _FeedForward(up, gate[0] if gate else None, self._address(weights.down.mT), weights.down.shape[-2])

    def _layer(self, layer: Layer) -> _Layer:
        dense, expert = self._feed_forward(layer.dense), self._feed_forward(layer.stacked)
        record = _Layer(self._address(layer.qkv.mT), self._address(layer.output.mT), dense, expert)
        if layer.moe is not None:
            router = layer.moe.router
            record.router = self._address(router.weight.detach().float())
            record.experts, record.divide_by_fanout = len(layer.experts), layer.moe.gate_norm == "fanout"
            if layer.cutoffs is not None:
                record.cutoffs = self._address(layer.cutoffs)
            else:
                chosen = router.rule.biased_top_k(router.state)
                assert chosen is not None, "see kernel_of"
                record.bias, record.chosen = self._address(chosen[0]), chosen[1]
        return record


def kernel_of(decoder: Decoder) -> Kernel | None:
    """Return the kernel, or None where it does not apply: on another device or dtype, without a compiler, or under a
    rule whose inference is more than a comparison with thresholds or a top k, with σ(scores) as gates.
    """
    if decoder.device.type != "cpu" or decoder.dtype not in (torch.float32, torch.bfloat16):
        return None
    kernels = library()
    return Kernel(decoder, kernels) if kernels is not None and all(map(_knows, decoder.layers)) else None


def _knows(layer: Layer) -> bool:
    if layer.moe is None or layer.cutoffs is not None:
        return True
    router = layer.moe.router
    return router.rule.sigmoid_gates and router.rule.biased_top_k(router.state) is not None


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
    kernels = cpu.decoder()
    if kernels is not None:
        kernels.decode_scratch.restype = kernels.decode_sample.restype = c_int64
    return kernels

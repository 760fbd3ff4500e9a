"""The routed sum in Triton kernels for NVIDIA GPUs (extra `triton`); nothing waits for the device.

Rows are gathered while they are multiplied, so no copy of the tokens is made. Kept for backward are the input, the
activations a = relu(h)² and the indices: the slope 2 · relu(h) is 2 · sqrt(a), more exact than from a rounded relu(h).

Tiles along the dimension that is summed over are the same in every configuration, and tokens are summed in the order of
experts: a row's result does not depend on the other rows or on how many there are, bit by bit, nor on the tuning.

Under TRITON_INTERPRET=1, set before triton is imported, the kernels run on the CPU, very slowly: for tests.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..experts import Experts, refuse_second_derivative
from .static import Segments, segments

INTERPRETED: bool = triton.knobs.runtime.interpret
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Along the dimension that is summed over, and columns whose part of a gate's gradient is summed at once.
DEPTH, PART = (16, 16) if INTERPRETED else (64, 64)
# Without tensor cores, which round float32, larger tiles do not fit the registers.
FIXED = {"BLOCK_M": 16, "BLOCK_N": 32} if INTERPRETED else {"BLOCK_M": 64, "BLOCK_N": 64}
TILES = [  # rows, columns, warps, stages of the pipeline
    (128, 256, 8, 3),
    (128, 256, 8, 4),
    (256, 128, 8, 3),
    (128, 128, 8, 3),
    (128, 128, 4, 3),
    (64, 256, 4, 3),
    (64, 128, 4, 4),
]
CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages) for m, n, warps, stages in TILES
]


@triton.jit
def multiply(
    left: Any,
    token: Any,
    pair: Any,
    ends: Any,
    weights: Any,
    gates: Any,
    kept: Any,
    out: Any,
    gated: Any,
    dots: Any,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    GATHERED: tl.constexpr,
    OUT_IN: tl.constexpr,
    EPILOGUE: tl.constexpr,
    UPCAST: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """out (rows, N): every row times the matrix of its expert, (N, K) if OUT_IN, else (K, N).

    Rows are those of left (rows, K), or if GATHERED of left (tokens, K). EPILOGUE "relu2" writes relu(·)². "backward"
    takes the product for the gradient of kept = relu(h)², and writes the gradient of h, gated = gate · kept, and into
    dots (rows, parts) the parts of <gradient, kept>, which add up to the gate's gradient.
    """
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    even: tl.constexpr = K % BLOCK_K == 0 and N % BLOCK_N == 0
    expert = tl.arange(0, triton.next_power_of_2(EXPERTS))
    end_of = tl.load(ends + expert, mask=expert < EXPERTS, other=0)
    begin_of = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < EXPERTS), other=0)
    tiles_of = (end_of - begin_of + BLOCK_M - 1) // BLOCK_M
    tiles_upto = tl.cumsum(tiles_of, 0)
    for tile in range(tl.program_id(0), tl.sum(tiles_of) * columns, tl.num_programs(0)):
        e = tl.sum((tiles_upto <= tile // columns).to(tl.int32))
        first_tile = tl.sum(tl.where(expert < e, tiles_of, 0))
        begin = tl.sum(tl.where(expert == e, begin_of, 0))
        end = tl.sum(tl.where(expert == e, end_of, 0))
        row = begin + (tile // columns - first_tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tile % columns * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        inside = row < end
        # Rows behind the segment's end compute what its first row does, and write nothing.
        held = tl.where(inside, row, begin)
        source = tl.load(token + held) if GATHERED else held.to(tl.int64)
        lefts = left + source[:, None] * K + k[None, :]
        place = k[:, None] + column[None, :] * K if OUT_IN else k[:, None] * N + column[None, :]
        rights = weights + e.to(tl.int64) * (K * N) + place
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            if even:
                l_tile, r_tile = tl.load(lefts), tl.load(rights)
            else:
                left_in = k[None, :] < K - start
                l_tile = tl.load(lefts, mask=left_in, other=0)
                r_tile = tl.load(rights, mask=(k[:, None] < K - start) & (column[None, :] < N), other=0)
            if UPCAST:
                l_tile, r_tile = l_tile.to(tl.float32), r_tile.to(tl.float32)
            product = tl.dot(l_tile, r_tile, product, input_precision="ieee")
            lefts += BLOCK_K
            rights += BLOCK_K if OUT_IN else BLOCK_K * N
        at = row.to(tl.int64)[:, None] * N + column[None, :]
        written = inside[:, None] & (column[None, :] < N)
        if EPILOGUE == "relu2":
            relu = tl.where(product < 0, 0.0, product)  # NaN stays
            product = relu * relu
        elif EPILOGUE == "backward":
            a = tl.load(kept + at, mask=written, other=0).to(tl.float32)
            gate = tl.load(gates + tl.load(pair + held)).to(tl.float32)[:, None]
            tl.store(gated + at, (gate * a).to(gated.dtype.element_ty), mask=written)
            parts: tl.constexpr = (N + PART - 1) // PART
            by_part = tl.reshape(tl.where(written, product * a, 0.0), (BLOCK_M, BLOCK_N // PART, PART))
            part = tile % columns * (BLOCK_N // PART) + tl.arange(0, BLOCK_N // PART)
            part_at = row.to(tl.int64)[:, None] * parts + part[None, :]
            tl.store(dots + part_at, tl.sum(by_part, 2), mask=inside[:, None] & (part[None, :] < parts))
            product = product * (2 * gate * tl.sqrt(a))
        tl.store(out + at, product.to(out.dtype.element_ty), mask=written)


@triton.jit
def multiply_segments(
    left: Any,
    right: Any,
    token: Any,
    ends: Any,
    out: Any,
    M: tl.constexpr,
    N: tl.constexpr,
    GATHER_LEFT: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """out (experts, M, N): leftᵀ right over the rows of every expert, zeros where it has none.

    One of both is gathered: left (tokens, M) and right (rows, N), or left (rows, M) and right (tokens, N).
    """
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M * columns
    e = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    m = tile // columns * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.load(ends + e - 1, mask=e > 0, other=0)
    end = tl.load(ends + e)
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(begin, end, BLOCK_K):
        row = start + tl.arange(0, BLOCK_K)
        inside = row < end
        source = tl.load(token + row, mask=inside, other=0)
        left_row = source if GATHER_LEFT else row.to(tl.int64)
        right_row = row.to(tl.int64) if GATHER_LEFT else source
        l_tile = tl.load(left + left_row[:, None] * M + m[None, :], mask=inside[:, None] & (m[None, :] < M), other=0)
        r_tile = tl.load(right + right_row[:, None] * N + n[None, :], mask=inside[:, None] & (n[None, :] < N), other=0)
        if UPCAST:
            l_tile, r_tile = l_tile.to(tl.float32), r_tile.to(tl.float32)
        product = tl.dot(l_tile.T, r_tile, product, input_precision="ieee")
    at = e.to(tl.int64) * (M * N) + m[:, None] * N + n[None, :]
    tl.store(out + at, product.to(out.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def sum_by_token(
    rows: Any,
    gates: Any,
    pair: Any,
    by_token: Any,
    of_token: Any,
    out: Any,
    D: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """out (tokens, D): the sums of every token's rows, in the order of experts, times their gates if GATED."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for place in range(tl.load(of_token + t), tl.load(of_token + t + 1)):
        row = tl.load(by_token + place)
        values = tl.load(rows + row * D + d, mask=d < D, other=0).to(tl.float32)
        if GATED:
            values *= tl.load(gates + tl.load(pair + row)).to(tl.float32)
        total += values
    tl.store(out + t * D + d, total.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def spread_gates(
    dots: Any,
    pair: Any,
    ends: Any,
    dgates: Any,
    EXPERTS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Adds up the parts of dots (rows, PARTS) and puts them where dgates (tokens, experts) has the row's pair."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < tl.load(ends + EXPERTS - 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        total += tl.load(dots + row.to(tl.int64) * PARTS + part, mask=inside, other=0)
    tl.store(dgates + tl.load(pair + row, mask=inside, other=0), total.to(dgates.dtype.element_ty), mask=inside)


def _tuned(kernel: Any) -> Any:
    """The kernel with the fastest tiles for its constants and dtypes, measured once and kept on disk."""
    constants = ["K", "N", "GATHERED", "OUT_IN", "EPILOGUE"] if kernel is multiply else ["M", "N", "GATHER_LEFT"]
    return triton.autotune(CONFIGS, key=["EXPERTS", *constants], cache_results=True)(kernel)



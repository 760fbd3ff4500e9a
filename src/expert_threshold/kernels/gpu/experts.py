"""The routed sum in Triton kernels for NVIDIA GPUs (extra `triton`). The host never waits for the device.

Rows are gathered while they are multiplied, so tokens are not copied. Backward needs the input, the activations a =
relu(h)² and the indices. It computes the slope 2 · relu(h) as 2 · sqrt(a), which is more accurate than a rounded
relu(h). SwiGLU is not fused: h is saved, and PyTorch computes the activation and its slope.

All configurations have the same tile size along the summed dimension, and the terms of a token are summed in the order
of experts. So the result for a row does not depend on other rows, their number or tuning, to the last bit.

For tests, TRITON_INTERPRET=1, set before triton is imported, runs the kernels on the CPU, very slowly.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import refuse_second_derivative
from ..activation import activation_named
from ..segments import Segments, gate_of_rows, segments

INTERPRETED: bool = triton.knobs.runtime.interpret
SWIGLU = activation_named("swiglu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# The tile size along the summed dimension, and the columns summed into one part of a gate's gradient.
DEPTH, PART = (16, 16) if INTERPRETED else (64, 32)
# For float32 without tensor cores, which would round. Larger tiles do not fit in the registers.
FIXED = {"tile_m": 16, "tile_n": 32} if INTERPRETED else {"tile_m": 64, "tile_n": 64}
# Rows, columns, warps and stages of the pipeline.
TILES = [(128, 256, 8, 3), (128, 256, 8, 4), (256, 128, 8, 3), (128, 128, 8, 4), (128, 128, 4, 3), (64, 128, 4, 4)]
CONFIGS = [triton.Config({"tile_m": m, "tile_n": n}, num_warps=w, num_stages=stages) for m, n, w, stages in TILES]


@triton.jit(do_not_specialize=["rows"])
def multiply(
    left: tl.tensor, token: tl.tensor, pair: tl.tensor, ends: tl.tensor, weights: tl.tensor, gates: tl.tensor,
    kept: tl.tensor, out: tl.tensor, gated: tl.tensor, dots: tl.tensor,
    rows: tl.tensor,
    experts: tl.constexpr, d_in: tl.constexpr, d_out: tl.constexpr,
    gathered: tl.constexpr, out_in: tl.constexpr, epilogue: tl.constexpr, upcast: tl.constexpr, part: tl.constexpr,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr,
) -> None:  # fmt: skip
    """Write out (rows, d_out), each row times its expert's matrix, (d_out, d_in) if out_in, otherwise (d_in, d_out).

    Rows are read from left (rows, d_in) or, if gathered, from left (tokens, d_in). The epilogue "relu2" writes
    relu(·)². "backward" treats the product as the gradient of kept = relu(h)². It writes the gradient of h, gated =
    gate · kept, and dots (parts, rows): the parts of <gradient, kept>, whose sum is the gradient of the gate.
    """
    columns: tl.constexpr = (d_out + tile_n - 1) // tile_n
    expert = tl.arange(0, triton.next_power_of_2(experts))
    end_of = tl.load(ends + expert, mask=expert < experts, other=0)
    begin_of = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    tiles_of = (end_of - begin_of + tile_m - 1) // tile_m
    tiles_upto = tl.cumsum(tiles_of, 0)
    # Flattened with the inner loop, so that the first rows of a tile are read while the previous tile is multiplied.
    for tile in tl.range(tl.program_id(0), tl.sum(tiles_of) * columns, tl.num_programs(0), flatten=True):
        e = tl.sum((tiles_upto <= tile // columns).to(tl.int32))
        first_tile = tl.sum(tl.where(expert < e, tiles_of, 0))
        begin = tl.sum(tl.where(expert == e, begin_of, 0))
        end = tl.sum(tl.where(expert == e, end_of, 0))
        row = begin + (tile // columns - first_tile) * tile_m + tl.arange(0, tile_m)
        column = tile % columns * tile_n + tl.arange(0, tile_n)
        k = tl.arange(0, tile_k)
        inside = row < end
        # Rows after the end of the segment repeat its first row and are not written.
        held = tl.where(inside, row, begin)
        source = tl.load(token + held) if gathered else held.to(tl.int64)
        lefts = left + source[:, None] * d_in + k[None, :]
        # Columns after the last one repeat the first, since a mask would prevent the pipelining of loads.
        read = column[None, :] % d_out
        place = k[:, None] + read * d_in if out_in else k[:, None] * d_out + read
        rights = weights + e.to(tl.int64) * (d_in * d_out) + place
        product = tl.zeros((tile_m, tile_n), tl.float32)
        for start in range(0, d_in, tile_k):
            if d_in % tile_k == 0:
                l_tile, r_tile = tl.load(lefts), tl.load(rights)
            else:
                l_tile = tl.load(lefts, mask=k[None, :] < d_in - start, other=0)
                r_tile = tl.load(rights, mask=k[:, None] < d_in - start, other=0)
            if upcast:
                l_tile, r_tile = l_tile.to(tl.float32), r_tile.to(tl.float32)
            product = tl.dot(l_tile, r_tile, product, input_precision="ieee")
            lefts += tile_k
            rights += tile_k if out_in else tile_k * d_out
        if epilogue == "backward":
            gate = tl.load(gates + tl.load(pair + row, mask=inside, other=0), mask=inside, other=0).to(tl.float32)
            write_backward(
                product, row, inside, gate, kept, out, gated, dots, rows, tile % columns * tile_n, d_out, tile_n, part
            )
        else:
            if epilogue == "relu2":
                relu = tl.where(product < 0, 0.0, product)  # NaN stays NaN
                product = relu * relu
            at = row.to(tl.int64)[:, None] * d_out + column[None, :]
            tl.store(out + at, product.to(out.dtype.element_ty), mask=inside[:, None] & (column[None, :] < d_out))


@triton.jit
def write_backward(
    da: tl.tensor, row: tl.tensor, inside: tl.tensor, gate: tl.tensor,
    kept: tl.tensor, dh: tl.tensor, gated: tl.tensor, dots: tl.tensor,
    rows: tl.tensor, first: tl.tensor,
    d_out: tl.constexpr, width: tl.constexpr, part: tl.constexpr,
) -> None:  # fmt: skip
    """Write the "backward" epilogue of `multiply` for columns first to first + width, which fit in the registers."""
    if width > part:
        lower, upper = tl.split(tl.permute(tl.reshape(da, (da.shape[0], 2, width // 2)), (0, 2, 1)))
        write_backward(lower, row, inside, gate, kept, dh, gated, dots, rows, first, d_out, width // 2, part)
        write_backward(
            upper, row, inside, gate, kept, dh, gated, dots, rows, first + width // 2, d_out, width // 2, part
        )
    else:
        column = first + tl.arange(0, width)
        at = row.to(tl.int64)[:, None] * d_out + column[None, :]
        written = inside[:, None] & (column[None, :] < d_out)
        a = tl.load(kept + at, mask=written, other=0).to(tl.float32)
        tl.store(gated + at, (gate[:, None] * a).to(gated.dtype.element_ty), mask=written)
        tl.store(dh + at, (da * (2 * gate[:, None] * tl.sqrt(a))).to(dh.dtype.element_ty), mask=written)
        dot = tl.sum(tl.where(written, da * a, 0.0), 1)
        tl.store(dots + first // part * rows.to(tl.int64) + row, dot, mask=inside & (first < d_out))


@triton.jit
def multiply_segments(
    left: tl.tensor, right: tl.tensor, token: tl.tensor, ends: tl.tensor, out: tl.tensor,
    d_left: tl.constexpr, d_right: tl.constexpr,
    gather_left: tl.constexpr, upcast: tl.constexpr,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr,
) -> None:  # fmt: skip
    """Write out (experts, d_left, d_right), leftᵀ right over the rows of each expert, or zeros if it has no rows.

    One operand is gathered: left is (tokens, d_left) and right (rows, d_right), or the reverse.
    """
    columns: tl.constexpr = (d_right + tile_n - 1) // tile_n
    tiles: tl.constexpr = (d_left + tile_m - 1) // tile_m * columns
    e = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    m = tile // columns * tile_m + tl.arange(0, tile_m)
    n = tile % columns * tile_n + tl.arange(0, tile_n)
    begin = tl.load(ends + e - 1, mask=e > 0, other=0)
    end = tl.load(ends + e)
    product = tl.zeros((tile_m, tile_n), tl.float32)
    source = tl.load(token + begin + tl.arange(0, tile_k), mask=begin + tl.arange(0, tile_k) < end, other=0)
    for start in range(begin, end, tile_k):
        row = start + tl.arange(0, tile_k)
        inside = row < end
        # Indices are read one step ahead, so that the copies of rows do not have to wait for them.
        next_source = tl.load(token + row + tile_k, mask=row + tile_k < end, other=0)
        left_row = source if gather_left else row.to(tl.int64)
        right_row = row.to(tl.int64) if gather_left else source
        l_tile = tl.load(left + left_row[:, None] * d_left + m[None, :] % d_left, mask=inside[:, None], other=0)
        r_tile = tl.load(right + right_row[:, None] * d_right + n[None, :] % d_right, mask=inside[:, None], other=0)
        if upcast:
            l_tile, r_tile = l_tile.to(tl.float32), r_tile.to(tl.float32)
        product = tl.dot(l_tile.T, r_tile, product, input_precision="ieee")
        source = next_source
    at = e.to(tl.int64) * (d_left * d_right) + m[:, None] * d_right + n[None, :]
    tl.store(out + at, product.to(out.dtype.element_ty), mask=(m[:, None] < d_left) & (n[None, :] < d_right))


@triton.jit
def sum_by_token(
    terms: tl.tensor, gates: tl.tensor, pair: tl.tensor, by_token: tl.tensor, of_token: tl.tensor, out: tl.tensor,
    width: tl.constexpr, gated: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    """Write out (tokens, width), the sum of each token's rows in terms (rows, width), in the order of experts.

    Rows are multiplied by their gates if `gated`.
    """
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, tile)
    total = tl.zeros((tile,), tl.float32)
    for place in range(tl.load(of_token + t), tl.load(of_token + t + 1)):
        row = tl.load(by_token + place)
        values = tl.load(terms + row * width + d, mask=d < width, other=0).to(tl.float32)
        if gated:
            values *= tl.load(gates + tl.load(pair + row)).to(tl.float32)
        total += values
    tl.store(out + t * width + d, total.to(out.dtype.element_ty), mask=d < width)


@triton.jit(do_not_specialize=["rows"])
def spread_gates(
    dots: tl.tensor, pair: tl.tensor, ends: tl.tensor, dgates: tl.tensor,
    rows: tl.tensor,
    experts: tl.constexpr, parts: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    """Sum the parts in dots (parts, rows) and write the sums to their pairs in dgates (tokens, experts)."""
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = row < tl.load(ends + experts - 1)
    total = tl.zeros((tile,), tl.float32)
    for part in range(parts):
        total += tl.load(dots + part * rows.to(tl.int64) + row, mask=inside, other=0)
    tl.store(dgates + tl.load(pair + row, mask=inside, other=0), total.to(dgates.dtype.element_ty), mask=inside)


def _tuned(kernel: Any, key: list[str]) -> Any:
    """Return the kernel with tiles that are tuned for the constants in `key`. The choice is cached on disk."""
    return triton.autotune(CONFIGS, key=key, cache_results=True)(kernel)


TUNED = {
    multiply: _tuned(multiply, ["d_in", "d_out", "gathered", "out_in", "epilogue"]),
    multiply_segments: _tuned(multiply_segments, ["d_left", "d_right", "gather_left"]),
}


def _is_tuned(dtype: torch.dtype) -> bool:
    return not INTERPRETED and dtype != torch.float32


def _launch(kernel: Any, grid: Any, first: Tensor, *rest: Tensor | int | None, **constants: Any) -> None:
    with torch.cuda.device_of(first):
        kernel[grid](first, *rest, **constants, enable_fp_fusion=True)


def _launch_product(kernel: Any, grid: Any, left: Tensor, *rest: Tensor | int | None, **constants: Any) -> None:
    """Launch a kernel with tuned tiles, or with fixed tiles in float32."""
    kernel, tiles = (TUNED[kernel], {}) if _is_tuned(left.dtype) else (kernel, FIXED)
    upcast = INTERPRETED and left.dtype == torch.bfloat16  # bfloat16 products in the interpreter are wrong
    _launch(kernel, grid, left, *rest, **constants, **tiles, tile_k=DEPTH, upcast=upcast)


def _multiply(
    left: Tensor, segments: Segments, weights: Tensor, *, gathered: bool = False, out_in: bool = False,
    epilogue: str = "", gates: Tensor | None = None, kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return what `multiply` writes: out, gated and dots. gated and dots are None without the "backward" epilogue."""
    rows, (experts, *matrix) = len(segments.token), weights.shape
    d_out, d_in = matrix if out_in else reversed(matrix)
    out = left.new_empty(rows, d_out)
    gated = None if kept is None else torch.empty_like(kept)
    dots = None if kept is None else left.new_empty(triton.cdiv(d_out, PART), rows, dtype=torch.float32)

    def grid(meta: dict[str, int]) -> tuple[int]:
        """Return the number of programs that run at the same time. Each loops over tiles."""
        if not left.is_cuda:
            return (3,)
        processors = torch.cuda.get_device_properties(left.device).multi_processor_count
        return (processors * (1 if meta["tile_m"] * meta["tile_n"] > 128 * 128 else 2),)

    _launch_product(
        multiply, grid,
        left, segments.token, segments.pair, segments.ends, weights, gates, kept, out, gated, dots, rows,
        experts=experts, d_in=d_in, d_out=d_out, gathered=gathered, out_in=out_in, epilogue=epilogue, part=PART,
    )  # fmt: skip
    return out, gated, dots


def _multiply_segments(left: Tensor, right: Tensor, segments: Segments, *, gather_left: bool) -> Tensor:
    """Return leftᵀ right over the rows of each expert, (experts, m, n)."""
    experts, m, n = len(segments.ends), left.shape[1], right.shape[1]
    out = left.new_empty(experts, m, n)

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (experts * triton.cdiv(m, meta["tile_m"]) * triton.cdiv(n, meta["tile_n"]),)

    _launch_product(
        multiply_segments, grid,
        left, right, segments.token, segments.ends, out, d_left=m, d_right=n, gather_left=gather_left,
    )  # fmt: skip
    return out


def _sum_by_token(rows: Tensor, segments: Segments, gates: Tensor | None = None) -> Tensor:
    """Return the sum of each token's rows (tokens, width), weighted by their gates if given."""
    tokens, width = len(segments.of_token) - 1, rows.shape[1]
    out = rows.new_empty(tokens, width)
    _launch(
        sum_by_token, (tokens,),
        rows, gates, segments.pair, segments.by_token, segments.of_token, out,
        width=width, gated=gates is not None, tile=triton.next_power_of_2(width),
    )  # fmt: skip
    return out


def _spread_gates(dots: Tensor, segments: Segments, gates: Tensor) -> Tensor:
    """Return the gradient of the gates (tokens, experts), given its parts for each row."""
    dgates = torch.zeros_like(gates)
    _launch(
        spread_gates, (triton.cdiv(dots.shape[1], 128),),
        dots, segments.pair, segments.ends, dgates, dots.shape[1],
        experts=gates.shape[1], parts=len(dots), tile=128,
    )  # fmt: skip
    return dgates


def _forward(x: Tensor, gates: Tensor, packed: Segments, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    relu2 = _is_relu2(up, down)
    kept, _, _ = _multiply(x, packed, up, gathered=True, out_in=True, epilogue="relu2" if relu2 else "")
    ys, _, _ = _multiply(kept if relu2 else SWIGLU.value(kept), packed, down, out_in=True)
    return _sum_by_token(ys, packed, gates), kept


def _backward(
    dy: Tensor, x: Tensor, gates: Tensor, packed: Segments, up: Tensor, down: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if _is_relu2(up, down):
        dh, gated, dots = _multiply(dy, packed, down, gathered=True, epilogue="backward", gates=gates, kept=kept)
    else:
        da, _, _ = _multiply(dy, packed, down, gathered=True)
        a, gate = SWIGLU.value(kept), gate_of_rows(gates, packed).to(x.dtype)[:, None]
        dh, gated, dots = SWIGLU.slope(kept, da * gate), a * gate, torch.sum(a * da, 1, dtype=torch.float32)[None]
    assert gated is not None
    assert dots is not None
    dgates = _spread_gates(dots, packed, gates)
    ddown = _multiply_segments(dy, gated, packed, gather_left=True)
    del gated, dots  # as large as a
    dup = _multiply_segments(dh, x, packed, gather_left=False)
    dxs, _, _ = _multiply(dh, packed, up)
    return _sum_by_token(dxs, packed), dgates, dup, ddown


def _is_relu2(up: Tensor, down: Tensor) -> bool:
    """Return False for SwiGLU, whose two matrices before the nonlinearity are stacked in `up`."""
    return up.shape[1] == down.shape[2]


@functools.cache
def _tune(up_shape: torch.Size, d_expert: int, dtype: torch.dtype, device: torch.device) -> None:
    """Tune tiles on many rows, so that a small first batch, such as a short prompt, does not decide for later ones."""
    experts, hidden, d_model = up_shape
    x, w = (torch.linspace(-1, 1, n * d_model, device=device, dtype=dtype).view(n, d_model) for n in (2**14, hidden))
    own = torch.arange(len(x), device=device)[:, None] % experts == torch.arange(experts, device=device)
    up, packed, gates = w.expand(experts, -1, -1).contiguous(), segments(own, len(x)), own.float()
    down = up[:, :d_expert].mT.contiguous()
    y, kept = _forward(x, gates, packed, up, down)
    _backward(y, x, gates, packed, up, down, kept)


# Custom operators, which are opaque to the compiler. packed: the assignment's `Segments`.
@torch.library.custom_op("expert_threshold::triton_forward", mutates_args=())
def triton_forward(x: Tensor, gates: Tensor, packed: list[Tensor], up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Return y (tokens, d_model) and what backward needs for every row, which is relu(h)², or h for SwiGLU."""
    if _is_tuned(x.dtype):
        _tune(up.shape, down.shape[2], x.dtype, x.device)
    return _forward(x, gates, Segments(*packed), up, down)


@triton_forward.register_fake
def _(x: Tensor, gates: Tensor, packed: list[Tensor], up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(packed[0].shape[0], up.shape[1])


@torch.library.custom_op("expert_threshold::triton_backward", mutates_args=())
def triton_backward(
    dy: Tensor, x: Tensor, gates: Tensor, packed: list[Tensor], up: Tensor, down: Tensor, kept: Tensor
) -> list[Tensor]:
    """Return the gradients of x, the gates, up and down."""
    return [*_backward(dy, x, gates, Segments(*packed), up, down, kept)]


@triton_backward.register_fake
def _(dy: Tensor, x: Tensor, gates: Tensor, packed: list[Tensor], *weights: Tensor) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in (x, gates, *weights[:2])]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gates, packed, *weights = inputs
    ctx.save_for_backward(x, gates, *packed, *weights, output[1])
    ctx.set_materialize_grads(False)  # otherwise, backward would allocate zeros as large as what is kept


def _back(ctx: Any, dy: Tensor, _: None) -> tuple[Any, ...]:
    refuse_second_derivative()
    x, gates, *packed, up, down, kept = ctx.saved_tensors
    dx, dgates, dup, ddown = triton_backward(dy.contiguous(), x, gates, packed, up, down, kept)
    return dx, dgates, [None] * len(packed), dup, ddown


triton_forward.register_autograd(_back, setup_context=_keep)


def routed_sum(
    x: Tensor, gates: Tensor, assignment: Tensor, ups: tuple[Tensor, ...], down: Tensor, rows: int | None = None
) -> Tensor:
    """Return y_t = Σ_e z[t,e] g[t,e] down_e · act(ups_e · x_t) for x (tokens, d_model).

    ups: one (experts, d_expert, d_model) for relu², two for SwiGLU; down: (experts, d_model, d_expert). x and weights
    have one of DTYPES. gates, assignment: (tokens, experts), float32 and bool. rows: a bound on the pairs; None counts
    them.
    """
    up, packed = ups[0] if len(ups) == 1 else torch.cat(ups, 1), segments(assignment, rows)
    y: Tensor = triton_forward(x.contiguous(), gates.contiguous(), [*packed], up.contiguous(), down.contiguous())[0]
    return y

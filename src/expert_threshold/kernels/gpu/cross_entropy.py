"""Computes the losses of a softcapped head from logits, in two reads and one write. Gradients overwrite the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 4096, 8


@triton.jit
def softmax_slopes_of_row(
    logits: tl.tensor, wanted: tl.tensor, losses: tl.tensor,
    vocab: tl.tensor, softcap: tl.tensor,
    with_gradient: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    """Write a row's loss and, if `with_gradient`, replace its logits by the slopes of `model.cross_entropy`."""
    row = tl.program_id(0)
    first = logits + row.to(tl.int64) * vocab
    word, target = tl.arange(0, tile), tl.load(wanted + row)
    top, total, at_target = -float("inf"), 0.0, 0.0
    for start in range(0, vocab, tile):
        inside = start + word < vocab
        score = tl.load(first + start + word, mask=inside, other=0).to(tl.float32)
        score = 2 * softcap * tl.sigmoid(score)
        # Exponentials are relative to the largest score so far, so that they do not overflow.
        higher = tl.maximum(top, tl.max(tl.where(inside, score, -float("inf"))))
        total = total * tl.exp(top - higher) + tl.sum(tl.where(inside, tl.exp(score - higher), 0.0))
        at_target += tl.sum(tl.where(start + word == target, score, 0.0))
        top = higher
    tl.store(losses + row, top - at_target + tl.log(total))
    if with_gradient:
        for start in range(0, vocab, tile):
            inside = start + word < vocab
            sigma = tl.sigmoid(tl.load(first + start + word, mask=inside, other=0).to(tl.float32))
            slope = tl.exp(2 * softcap * sigma - top) / total - tl.where(start + word == target, 1.0, 0.0)
            slope *= sigma * (1 - sigma)
            tl.store(first + start + word, slope.to(logits.dtype.element_ty), mask=inside)


def softmax_slopes(
    logits: Tensor, wanted: Tensor, losses: Tensor, softcap: float, with_gradient: bool, tile: int = TILE
) -> None:
    """Write the losses (rows,) for logits (rows, vocab). If `with_gradient`, replace the logits by the slopes."""
    if not logits.numel():
        return
    with torch.cuda.device_of(logits):
        softmax_slopes_of_row[(len(logits),)](
            logits, wanted, losses, logits.shape[1], softcap,
            with_gradient=with_gradient, tile=tile, num_warps=WARPS,
        )  # fmt: skip

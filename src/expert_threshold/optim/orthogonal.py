"""The functions between Muon's momentum and its update, on stacks of matrices (…, rows, columns).

In the order in which Muon applies them: `normalize` as MuonEq's equilibration, `orthogonalize`,
`normalize` as Muon+'s renormalisation, `normuon`. Only the iteration is always there.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

OrthogonalizerName = Literal["newton_schulz", "polar_express"]
Lines = Literal["rows", "columns"]
Parts = Literal["rows", "columns", "matrix"]
Side = Literal["rows", "columns", "longer"]
Polynomial = tuple[float, float, float]  # a, b, c of a x + b x³ + c x⁵

COEFFICIENTS: Polynomial = (3.4445, -4.7750, 2.0315)
EPS = 1e-7  # the smallest norm to divide by
# The best polynomials of five steps for singular values from 0.001 to 1, which end within 0.1411 of 1; as nanochat has
# them, computed with a safety factor of 0.02 and a cushion of 2. Later steps repeat the last. The norm's own factor
# keeps rounding from pushing singular values above 1.
POLAR_EXPRESS: tuple[Polynomial, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
POLAR_EXPRESS_SAFETY = 1.01
LEAST_SECOND_MOMENT = 1e-10


def iteration(name: OrthogonalizerName, steps: int) -> tuple[list[Polynomial], float]:
    """Return the polynomial of each step, and the factor of the norm that matrices are divided by before the first."""
    if name == "newton_schulz":
        return [COEFFICIENTS] * steps, 1.0
    return [POLAR_EXPRESS[min(step, len(POLAR_EXPRESS) - 1)] for step in range(steps)], POLAR_EXPRESS_SAFETY


@torch.no_grad()
def orthogonalize(
    matrices: Tensor,
    name: OrthogonalizerName = "newton_schulz",
    steps: int = 5,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the matrices with all singular values about 1 and the same singular vectors; a zero matrix stays zero.

    matrices: (…, rows, columns). Iterates X ← (a + b X Xᵀ + c (X Xᵀ)²) X from X = M / ‖M‖, the matrix's own Frobenius
    norm. newton_schulz: Jordan et al., Muon (2024). polar_express starts from X = M / (1.01 ‖M‖), each polynomial is
    the best one for the interval in which the one before leaves the singular values, so that small ones grow faster and
    all end closer to 1: Amsel et al., The Polar Express (2025). dtype: of the products and of the result.
    """
    polynomials, safety = iteration(name, steps)
    rows, columns = matrices.shape[-2:]
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp_(min=EPS).mul_(safety)
    x = torch.div(matrices, norm, out=torch.empty_like(matrices, dtype=dtype)).reshape(-1, rows, columns)
    # The polynomial multiplies from the smaller side: X (a + b XᵀX + …) is the same matrix.
    wide = rows <= columns
    gram = x.new_empty(len(x), min(rows, columns), min(rows, columns))
    polynomial, new = torch.empty_like(gram), torch.empty_like(x)
    for a, b, c in polynomials:
        torch.bmm(*((x, x.mT) if wide else (x.mT, x)), out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        # a X is added outside the product: with a on the polynomial's diagonal, bfloat16's error would double.
        torch.baddbmm(x, *((polynomial, x) if wide else (x, polynomial)), beta=a, out=new)
        x, new = new, x
    return x.view(matrices.shape)


def normalize(matrices: Tensor, parts: Parts) -> Tensor:
    """Return M with equal norms of its rows, M_i √(min(m, n) / m) / ‖M_i‖, or of its columns; or M √min(m, n) / ‖M‖.

    So every matrix (m, n) gets the Frobenius norm √min(m, n) of an orthogonal one; what is zero stays zero. Before the
    iteration this is the equilibration of Chang et al., MuonEq (2026), and behind it the renormalisation of Zhang et
    al., Muon+ (2026), which has rows or columns of norm 1; nanochat renormalises the whole matrix.
    """
    dim = {"rows": -1, "columns": -2, "matrix": (-2, -1)}[parts]
    norm: Tensor = torch.linalg.vector_norm(matrices, dim=dim, keepdim=True).clamp_(min=EPS)
    count = norm.shape[-2] * norm.shape[-1]
    return matrices * (math.sqrt(min(matrices.shape[-2:]) / count) / norm)


def second_moment_shape(matrices: torch.Size, side: Side) -> tuple[int, ...]:
    """Return the shape of NorMuon's second moments, one of each row, column, or line along the longer side."""
    *stack, rows, columns = matrices
    by_row = side == "rows" or (side == "longer" and rows >= columns)
    return (*stack, rows, 1) if by_row else (*stack, 1, columns)


@torch.no_grad()
def normuon(update: Tensor, second_moment: Tensor, beta: float) -> Tensor:
    """Update v ← β v + (1 − β) mean(U²) over each row or column, and returns U / √v scaled to the norm of U.

    So rows that moved more than others for a while move less. second_moment: v, of `second_moment_shape`, changed in
    place. Li et al., NorMuon (2025), has rows, and scales to a root mean square of 0.2; to keep the norm, and the
    longer side, are nanochat's.
    """
    mean = update.square().sum_to_size(second_moment.shape) / (update.numel() // second_moment.numel())
    second_moment.lerp_(mean, 1 - beta)
    scale = second_moment.clamp(min=LEAST_SECOND_MOMENT).rsqrt()
    before, after = (squares.sum((-2, -1), keepdim=True) for squares in (mean, mean * scale.square()))
    return update * (scale * (before / after.clamp(min=LEAST_SECOND_MOMENT)).sqrt())

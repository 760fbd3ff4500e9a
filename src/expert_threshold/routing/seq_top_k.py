"""Sequence top-k (SeqTopK): every sequence takes its best token-expert pairs, experts_per_token times its length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ..option import Count, NonNegativeInt, Positive, option
from .cutoffs import as_ratio
from .gates import NULL_SCORES, Gate, Gated, weights_of
from .observation import Observation, Routing, observe
from .rule import Rule, Scope, Window
from .selection import kth_largest, take


class Stateless(NamedTuple):
    """The state of a rule that remembers nothing between steps."""


@dataclass(frozen=True)
class SeqTopK(Gated):
    """Every sequence takes its best token-expert pairs; tokens share a budget, and a token may get no expert.

    With T tokens in a sequence, k = experts_per_token and pairs (t, i) ordered by s, highest first, with ties to the
    lower token and then the lower expert (arXiv:2511.06494; NVIDIA/Megatron-LM #6208):

        training    z[t,i] = 1{(t, i) among the ⌊T k⌋ best pairs of the sequence}
        inference   z[t,i] = 1{(t, i) among the ⌊t k⌋ best pairs of the tokens 1 … t}

    Inference routes each token once, by the pairs up to it, so decoding keeps the scores of a sequence. s is softmax(r)
    if the gates are softmax, otherwise r. Only a token's max_per_token best pairs compete. Nothing balances the load.
    """

    experts_per_token: float = option(1, "Mean number of routed experts per token in a sequence.")
    max_per_token: Count | None = option(None, "Maximum number of experts per token. Defaults to no limit.")
    gate: Gate = option(
        "sigmoid",
        "Function that turns scores into gates; see token_choice for the choices. With softmax, pairs are also "
        "compared by their gates.",
    )
    gate_scale: Positive = option(1.0, "Factor applied to all gates.")
    null_scores: NonNegativeInt = option(0, NULL_SCORES)

    def __post_init__(self) -> None:
        super().__post_init__()
        k, most = self.experts_per_token, self.max_per_token
        if most is not None and not k < most <= self.num_experts:
            raise ValueError(
                f"max_per_token={most} must be above experts_per_token={k:g} (if equal, use token_choice) and at most "
                f"num_experts={self.num_experts}"
            )

    def init(self) -> Stateless:
        return Stateless()

    def route(
        self, scores: Tensor, state: Stateless, *, training: bool, group: dist.ProcessGroup | None = None
    ) -> Routing:
        """Route float32 scores of shape (batch, time, num_scores), in which each row is a sequence from its start."""
        values = self._values(scores.detach())
        batch, time, experts = values.shape
        pairs, (budget,) = values.flatten(1)[..., None], self._budgets([time])
        if training and batch and time and not budget:
            k = f"k = ⌊{time} · {self.experts_per_token}⌋ = 0"
            raise ValueError(f"{k}, so no expert gets a token; use longer sequences or a larger experts_per_token")
        if training or batch * time == 0:
            assignment = take(pairs, kth_largest(pairs, [budget])[0])
        else:
            rank = torch.empty_like(pairs[..., 0], dtype=torch.int64)
            order = pairs[..., 0].sort(dim=1, descending=True, stable=True).indices
            rank.scatter_(1, order, torch.arange(time * experts, device=scores.device).expand(batch, -1))
            budgets = torch.tensor(self._budgets(range(1, time + 1)), device=scores.device)
            last = kth_of_prefixes(rank, experts, budgets)
            assignment = rank <= last.repeat_interleave(experts, 1)
        assignment = assignment.reshape(values.shape)
        # Nothing uses the gates of a token without experts, but they must be finite.
        chosen = assignment | ~assignment.any(-1, keepdim=True)
        gates = self.gates_of(scores, chosen)
        target = batch * time * self.experts_per_token / experts
        observation = observe(scores, assignment, gates, target=target)
        return Routing(scores=scores, gates=gates, assignment=assignment, observation=observation)

    def _values(self, scores: Tensor) -> Tensor:
        """Return s (batch, time, experts), which orders the pairs; −∞ excludes all but a token's max_per_token best."""
        values = self.without_nulls(weights_of(self.gate, scores) if self.gate == "softmax" else scores)
        if self.max_per_token is None:
            return values
        of_token = values.reshape(-1, self.num_experts, 1)
        (lowest,) = kth_largest(of_token, [self.max_per_token])
        return values.masked_fill(~take(of_token, lowest).reshape(values.shape), -torch.inf)

    def _budgets(self, counts: Iterable[int]) -> list[int]:
        """Return ⌊tokens · experts_per_token⌋ for each count of tokens, from the decimal form of experts_per_token.

        Integers of Python are exact; in a tensor, products with a long decimal form would overflow.
        """
        numerator, denominator = as_ratio(self.experts_per_token)
        return [tokens * numerator // denominator for tokens in counts]

    def update(self, state: Stateless, observation: Observation) -> Stateless:
        return state

    @property
    def label(self) -> str:
        most = "" if self.max_per_token is None else f" ≤ {self.max_per_token}"
        return f"SeqTopK{most}{self.label_of_gates()}"

    def scope(self, training: bool) -> Scope:
        return "sequence"

    def max_pairs(self, tokens: int, *, training: bool, ranks: int = 1) -> int | None:
        return self._budgets([tokens])[0] if training else None

    def window(self, sequence: int, batch: int, step: int) -> Window:
        return Window(sequence, None)

    @classmethod
    def cases(cls) -> Mapping[str, Rule]:
        gates = {f"{gate} gates": cls(6, 2, gate=gate) for gate in get_args(Gate) if gate != "sigmoid"}
        capped = {f"at most {most}": cls(6, 2, max_per_token=most) for most in (3, 4)}
        fractions = {f"{fanout} of them": cls(6, fanout) for fanout in (0.3, 1, 1.5, 6)}
        nulls = {"null scores": cls(6, 2, gate="softmax", null_scores=3)}
        scaled = {"scaled": cls(6, 2, gate="softmax", gate_scale=2.5, max_per_token=4, null_scores=2)}
        return fractions | capped | gates | nulls | scaled


def kth_of_prefixes(ranks: Tensor, width: int, ks: Tensor) -> Tensor:
    """Return the k_t-th smallest of the first t · width ranks of every row, (rows, times); −1 where k_t is 0.

    ranks: (rows, times · width) int64, each row a permutation of 0, 1, …; ks: (times,), each at most t · width for t
    from 1. A wavelet matrix partitions the ranks by one bit at a time, highest first, in O(n log n) without a loop over
    tokens. In every prefix, the number of ranks with a 0 bit decides which part contains the k-th smallest.
    """
    rows, size = ranks.shape
    start = torch.zeros(rows, len(ks), dtype=torch.int64, device=ranks.device)
    end = start + width * torch.arange(1, len(ks) + 1, device=ranks.device)
    left, found = ks.expand(rows, -1), start
    for bit in reversed(range(size.bit_length())):
        ones = (ranks >> bit) & 1
        before = torch.nn.functional.pad((1 - ones).cumsum(1), (1, 0))  # zeros among the first 0, 1, …, size
        zeros = before[:, -1:]
        low, high = before.gather(1, start), before.gather(1, end)
        is_one = left > high - low
        left = torch.where(is_one, left - (high - low), left)
        found = found | (is_one.long() << bit)
        start = torch.where(is_one, zeros + start - low, low)
        end = torch.where(is_one, zeros + end - high, high)
        ranks = ranks.gather(1, ones.sort(dim=1, stable=True).indices)
    return torch.where(ks > 0, found, -1)

"""Token choice: every token takes its experts_per_token highest-scoring experts (paper, Eq. 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ..option import Count, NonNegative, NonNegativeInt, Positive, option
from .cutoffs import as_ratio
from .gates import NULL_SCORES, Gate, Over, Valued, shares_of
from .observation import Observation, Routing, observe, over_ranks
from .rule import Rule, Scope, Window
from .selection import kth_largest, take

Balance = Literal["none", "aux", "global_aux", "loss_free", "loss_free_proportional"]
_LABELS = {
    "none": "TC",
    "aux": "TC aux",
    "global_aux": "TC global aux",
    "loss_free": "TC loss-free",
    "loss_free_proportional": "TC loss-free prop.",
}


class BiasState(NamedTuple):
    """The bias that is added to scores for selection only. It stays 0 unless balance is loss-free."""

    bias: Tensor  # (experts,) float32


@dataclass(frozen=True)
class TokenChoice(Valued):
    """Every token goes to k experts; loads are balanced by a loss, by biases or not at all.

    The biases are b, and s stands for the scores r or, with over="gates", for σ(r) or softmax(r), as the gates use:

        z[t,i] = 1{i among the k largest of s[t,·] + b, in the best groups of token t}

    Consecutive experts form num_groups groups. A group's value is the sum of its two largest s + b, and a token chooses
    its experts within its groups_per_token best groups (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). docs/routing.md
    lists the options of published models. With a capacity_factor F, training keeps the ⌈F · T · k / E⌉ largest gates of
    each expert among the T tokens of a micro-batch and drops the rest (GShard; Switch, arXiv:2101.03961, Eq. 3).
    """

    experts_per_token: Count = option(1, "Number of routed experts per token.")
    balance: Balance = option(
        "none",
        "Method of load balancing. aux and global_aux add an auxiliary loss on the load of each micro-batch or of "
        "all ranks. loss_free and loss_free_proportional add biases to the scores during selection.",
    )
    aux_strength: NonNegative = option(0.001, "Strength α of auxiliary losses.")
    bias_rate: NonNegative = option(0.005, "Step size u of loss-free biases.")
    gate: Gate = option(
        "sigmoid",
        "Function that turns scores into gates. softmax is taken over all experts and null scores, softmax_chosen "
        "over the chosen experts only. sigmoid_normalised divides each sigmoid by the sum over the chosen experts.",
    )
    gate_scale: Positive = option(1.0, "Factor applied to all gates.")
    over: Over = option(
        "scores",
        "Values to which biases are added and by which groups are compared: the scores, or their sigmoid or softmax.",
    )
    num_groups: Count = option(1, "Number of groups of experts.")
    groups_per_token: Count = option(1, "Number of groups from which a token chooses its experts.")
    null_scores: NonNegativeInt = option(0, NULL_SCORES)
    capacity_factor: Positive | None = option(None, "Maximum load in training, as a multiple of the mean load.")

    def __post_init__(self) -> None:
        super().__post_init__()
        experts, groups, of_token = self.num_experts, self.num_groups, self.groups_per_token
        if experts % groups:
            raise ValueError(f"num_groups={groups} must divide num_experts={experts}")
        least = -(-self.experts_per_token * groups // experts)
        if not least <= of_token <= groups:
            raise ValueError(
                f"groups_per_token={of_token} must be at least {least}, so that these groups contain "
                f"experts_per_token experts, and at most num_groups={groups}"
            )

    def init(self) -> BiasState:
        return BiasState(torch.zeros(self.num_experts, dtype=torch.float32))

    def route(
        self, scores: Tensor, state: BiasState, *, training: bool, group: dist.ProcessGroup | None = None
    ) -> Routing:
        """Route scores (batch, time, num_scores) float32 by z_t = Top(s_t + b). Ties go to the lower index."""
        tokens, experts = scores[..., 0].numel(), self.num_experts
        values = self.values_of(scores)
        biased = self._in_best_groups((values + state.bias).reshape(tokens, experts))
        chosen = _best(biased, self.experts_per_token).reshape(values.shape)
        gates = self.gates_of(scores, chosen)
        assignment = self._kept(chosen, gates.detach()) if training and self.capacity_factor else chosen
        raw_load = {"raw_load": chosen.flatten(0, -2).sum(0)} if self.capacity_factor else {}
        target = tokens * self.experts_per_token / experts
        observation = observe(scores, assignment, gates, target=target, **raw_load)
        loss = None
        if training and self.balance in ("aux", "global_aux"):
            load = over_ranks(_chosen(observation), group if self.balance == "global_aux" else None)
            loss = auxiliary_loss(shares_of(self.gate, self.without_nulls(scores)), load, strength=self.aux_strength)
        return Routing(scores=scores, gates=gates, assignment=assignment, observation=observation, loss=loss)

    def _kept(self, chosen: Tensor, gates: Tensor) -> Tensor:
        """Return the chosen pairs (batch, time, experts) that fit their expert's capacity, largest gates first."""
        rows = gates.masked_fill(~chosen, -1).reshape(1, -1, self.num_experts)  # gates are not negative
        (last,) = kth_largest(rows, [self.load_bounds(rows.shape[1])[1]])  # type: ignore[index]
        return chosen & take(rows, last).reshape(chosen.shape)

    def _in_best_groups(self, biased: Tensor) -> Tensor:
        """Return the values (tokens, experts), with −∞ for experts outside the best groups of a token."""
        if self.groups_per_token == self.num_groups:
            return biased
        size = self.num_experts // self.num_groups
        of_group = biased.view(-1, self.num_groups, size).topk(min(2, size), dim=-1).values.sum(-1)
        best = _best(of_group, self.groups_per_token).repeat_interleave(size, dim=-1)
        return biased.masked_fill(~best, -torch.inf)

    @torch.no_grad()
    def update(self, state: BiasState, observation: Observation) -> BiasState:
        if not self._moves_biases:
            return state
        proportional = self.balance == "loss_free_proportional"
        return BiasState(move_bias(state.bias, _chosen(observation), rate=self.bias_rate, proportional=proportional))

    @property
    def _moves_biases(self) -> bool:
        return self.balance in ("loss_free", "loss_free_proportional")

    @property
    def label(self) -> str:
        groups = "" if self.num_groups == 1 else f" {self.groups_per_token} of {self.num_groups} groups"
        capacity = f" ≤ {self.capacity_factor:g}" if self.capacity_factor else ""
        return _LABELS[self.balance] + self.label_of_gates() + groups + capacity

    def scope(self, training: bool) -> Scope:
        return "batch" if training and self.capacity_factor else "token"

    def pool_scope(self) -> Scope | None:
        capacity: Scope | None = "batch" if self.capacity_factor else None
        return {"aux": "batch", "global_aux": "global"}.get(self.balance, capacity)  # type: ignore[return-value]

    def max_pairs(self, tokens: int, *, training: bool, ranks: int = 1) -> int:
        return tokens * self.experts_per_token

    def load_bounds(self, tokens: int) -> tuple[int, int] | None:
        if self.capacity_factor is None:
            return None
        factor, unit = as_ratio(self.capacity_factor)
        return 0, min(-(-tokens * self.experts_per_token * factor // (self.num_experts * unit)), tokens)

    def window(self, sequence: int, batch: int, step: int) -> Window:
        measured = {"none": None, "aux": batch, "global_aux": batch}
        return Window(measured.get(self.balance, step), None)

    def biased_top_k(self, state: BiasState) -> tuple[Tensor, int] | None:
        by_scores = self.over == "scores" and self.groups_per_token == self.num_groups
        return (state.bias, self.experts_per_token) if by_scores else None

    def describe(self, state: BiasState) -> dict[str, Tensor]:
        return {"bias": state.bias} if self._moves_biases else {}

    def measure(self, state: BiasState, observation: Observation) -> dict[str, Tensor]:
        """Return `dropped`, the share of each expert's tokens beyond its capacity, if capacity is limited."""
        if self.capacity_factor is None:
            return {}
        return {"dropped": (observation.raw_load - observation.load) / observation.raw_load.clamp(min=1)}

    @classmethod
    def cases(cls) -> Mapping[str, Rule]:
        grouped: dict[str, Any] = {"balance": "loss_free", "over": "gates", "num_groups": 3, "groups_per_token": 2}
        balances = {
            f"{balance}, {fanout} of them": cls(6, fanout, balance=balance)
            for balance in get_args(Balance)
            for fanout in (1, 2)
        }
        gates = {f"{gate} gates": cls(6, 2, gate=gate) for gate in get_args(Gate) if gate != "sigmoid"}
        others = {
            "all of them": cls(6, 6),
            "as Mixtral": cls(6, 2, balance="aux", gate="softmax_chosen"),
            "as DeepSeek-V3": cls(6, 2, gate="sigmoid_normalised", gate_scale=2.5, **grouped),
            "one of six groups": cls(6, 1, num_groups=6),
            "over shares": cls(6, 2, gate="softmax", over="gates"),
            "null scores": cls(6, 2, balance="aux", gate="softmax", null_scores=3),
            "null scores in groups": cls(6, 2, gate="softmax", null_scores=3, **grouped),
        }
        capacity = {
            f"capacity, {balance}": cls(6, 2, gate="softmax", balance=balance, capacity_factor=1.25)
            for balance in ("none", "aux", "loss_free")
        }
        return balances | gates | others | capacity


def _chosen(observation: Observation) -> Tensor:
    """Return the loads (experts,) before any token is dropped, on which balancing acts."""
    return observation.sums.get("raw_load", observation.load)


def _best(values: Tensor, k: int) -> Tensor:
    """Return a mask of the k largest values in each row of (tokens, n), with ties going to the lower index."""
    # Here experts compete for a token, whereas elsewhere tokens compete for an expert. So every token is a pool.
    (lowest,) = kth_largest(values[..., None], [k])
    return take(values[..., None], lowest)[..., 0]


def auxiliary_loss(gates: Tensor, load: Tensor, *, strength: float) -> Tensor:
    """Return α Σ_i f_i P_i (paper, Related Work, Load Balancing), differentiable only through the gates.

    gates: (batch, time, experts), computed by `shares_of`; their means over tokens are P_i. load: (experts,), which
    determines f. Under perfect balance, the loss is α Σ_i P_i.
    """
    gates = gates.reshape(-1, gates.shape[-1])
    mean_gate = gates.sum(0) / max(len(gates), 1)
    return strength * (normalised_load(load) * mean_gate).sum()


def normalised_load(load: Tensor) -> Tensor:
    """Return f_i, the load of each expert divided by the mean load. If no token was routed, every f_i is 1."""
    mean = load.sum() / len(load)
    return torch.where(mean > 0, load / mean, 1.0)


def move_bias(bias: Tensor, load: Tensor, *, rate: float, proportional: bool) -> Tensor:
    """Return b_i + u · sign(1 − f_i), or b_i + u · (1 − f_i) (paper, Related Work, Load Balancing)."""
    error = 1 - normalised_load(load)
    return bias + rate * (error if proportional else error.sign())

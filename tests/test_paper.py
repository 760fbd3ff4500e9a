"""Every number that the paper states, as a literal; what numbers do is tested where it is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from expert_threshold import config, recipes
from expert_threshold.model import GPTConfig
from expert_threshold.model.attention import norm
from expert_threshold.moe.router import Router
from expert_threshold.optim import RELEASE, OptimConfig, groups, muon, orthogonalize
from expert_threshold.routing import ExpertChoice, ExpertThreshold, TokenChoice, cutoffs, expert_threshold

EXPERTS = {"num_experts": 16, "experts_per_token": 1}
CUTOFFS = EXPERTS | {"decay": 0.999, "debias": True}
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-10, "adamw_warmup_steps": 250}
MOMENTUM = {"momentum": 0.95, "momentum_warmup_steps": 300, "ns_steps": 5}
PLAIN = {"orthogonalizer": "newton_schulz", "equilibrate": None, "renormalize": None, "normuon": None}
PLAIN |= {"weight_decay": 0.0, "muon_warmup_steps": 0, "momentum_end": None}
RATES = {"matrix_lr": 0.02, "embed_lr": 0.2, "head_lr": 0.004, "router_lr": None, "router_optimizer": "muon"}
SCHEDULE = {"cooldown": 1.0, "min_lr_ratio": 0.1, "clip": None, "scale_muon": True}
OF_RELEASE = {"router_lr": 0.004, "router_optimizer": "adamw", "betas": (0.8, 0.95), "adamw_warmup_steps": 0}
OF_RELEASE |= {"cooldown": 0.2, "min_lr_ratio": 0.0, "clip": 1.0, "scale_muon": False}
SIZES = {"vocab_size": 65_536, "context": 2048, "shared_experts": 1, "dense_layers": 1, "activation": "relu2"}
D12 = {"layers": 12, "d_model": 768, "heads": 6, "kv_heads": 6, "d_expert": 1536, "d_feed_forward": 3072}
D20 = {"layers": 20, "d_model": 1280, "heads": 10, "kv_heads": 10, "d_expert": 2560, "d_feed_forward": 5120}
HEAD = {"softcap": 15.0, "gate_norm": None, "z_loss": None, "rotary_base": 10_000.0}

STATED: dict[str, tuple[Any, dict[str, Any]]] = {
    "optimizers": (OptimConfig(), RATES | SCHEDULE | ADAMW | MOMENTUM | PLAIN),
    "optimizers of the release": (RELEASE, RATES | SCHEDULE | ADAMW | MOMENTUM | PLAIN | OF_RELEASE),
    "momentum": (groups, {"MOMENTUM_START": 0.85}),
    "iteration": (muon, {"COEFFICIENTS": (3.4445, -4.7750, 2.0315), "EPS": 1e-7}),
    "expert threshold": (ExpertThreshold(), CUTOFFS | {"warmup_steps": 4000, "capacity_slack": 0.5, "pool": "global"}),
    "expert choice": (ExpertChoice(), CUTOFFS | {"pool": "batch"}),
    "token choice": (TokenChoice(), EXPERTS | {"balance": "none", "aux_strength": 0.001, "bias_rate": 0.005}),
    "model": (GPTConfig(), SIZES | D12 | HEAD),
    "d12": (GPTConfig.preset("d12"), SIZES | D12 | HEAD),
    "d20": (GPTConfig.preset("d20"), SIZES | D20 | HEAD),
    "runs": (recipes, {"PAPER_STEPS": 19_073, "EVAL_EVERY": 250, "EVAL_TOKENS": 10_485_760}),
    "scaled optimizers": (config, {"PAPER_ADAMW_WARMUP_STEPS": 250, "PAPER_MOMENTUM_WARMUP_STEPS": 300}),
    "scaled cutoffs": (cutoffs, {"PAPER_STEPS": 19_073, "PAPER_DECAY": 0.999, "PAPER_WARMUP_STEPS": 4000}),
    "least decay of cutoffs": (cutoffs, {"LEAST_DECAY": 0.9}),
    "short runs": (expert_threshold, {"SHORT_RUN": 2000, "TREND_DECAY": 0.6}),
}


@pytest.mark.parametrize("case", STATED.values(), ids=STATED)
def test_numbers_are_those_that_are_stated(case: tuple[Any, dict[str, Any]]) -> None:
    owner, numbers = case
    assert {name: getattr(owner, name) for name in numbers} == numbers


def test_a_router_by_itself_starts_with_scores_of_deviation_one() -> None:
    torch.manual_seed(0)
    weight = Router(256, ExpertThreshold(num_experts=256)).weight.detach()
    assert float(weight.std()) == pytest.approx(256**-0.5, rel=0.02)


def test_norms_add_the_float32_epsilon() -> None:
    x = torch.full((1, 4), 2.0**-12)
    torch.testing.assert_close(norm(x), x * (2.0**-24 + 2.0**-23) ** -0.5)


def test_the_iteration_leaves_what_is_smaller_than_its_epsilon_small() -> None:
    """A matrix of norm 1e-8 begins as one of norm 0.1."""
    matrix = torch.zeros(4, 4)
    matrix[0, 0] = 1e-8
    first = orthogonalize(matrix, steps=1)[0, 0]
    assert float(first) == pytest.approx(3.4445 * 0.1 - 4.7750 * 0.1**3 + 2.0315 * 0.1**5)

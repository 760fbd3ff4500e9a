"""The paper's runs: that each is there, as in the paper, at any size, and reachable from the command line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import resolved, said
from expert_threshold.config import RUNS, RunConfig, resolve, run_config, scaled_optim
from expert_threshold.model import TRUNKS
from expert_threshold.optim import NANOCHAT, make_optimizers
from expert_threshold.plan import window
from expert_threshold.recipes import PAPER_STEPS, RECIPES, scaled_decay
from expert_threshold.routing import ExpertChoice, ExpertThreshold
from expert_threshold.train.checks import require_pools_fit

K = 1024
PAPER = Path(__file__).parents[1] / ".." / "shared" / "paper" / "expert-threshold-routing.tex"


def of_paper(name: str) -> RunConfig:
    return resolve(RECIPES[name].preset, recipe=name)


def tokens(config: RunConfig) -> int:
    return config.train.steps * config.train.batch_size * config.train.accumulation * config.model.context


def test_better_rates_are_nanochats_under_the_papers_optimizers_at_any_width() -> None:
    """At d_model 128, λ makes 0.3 and 0.008 of AdamW 0.73 and 0.0196; Muon's 0.02 has no λ."""
    optim = resolve("quickstart", {"rule.name": "dense"}, recipe="better_rates").optim
    rates = {"matrix_lr": 0.02, "embed_lr": 0.3, "head_lr": 0.008, "scale_muon": False}
    given = rates | {"betas": (0.8, 0.95), "adamw_warmup_steps": 0}
    assert optim == replace(scaled_optim(1200), **given)
    model = [("embed.weight", torch.zeros(2, 2)), ("head.weight", torch.zeros(2, 2)), ("up.weight", torch.zeros(2, 2))]
    found = make_optimizers(model, optim, 128).learning_rates(0, 1200)
    assert found == pytest.approx({"matrix": 0.02, "embed": 0.7348, "head": 0.0196}, rel=1e-3)


def test_recipes_keep_their_own_settings_but_for_warmups_in_short_runs() -> None:
    short = resolve("quickstart", {"train.steps": 100}, recipe="nanochat").optim
    assert short == replace(NANOCHAT, adamw_warmup_steps=10, muon_warmup_steps=10, momentum_warmup_steps=100)
    assert resolve("d12", recipe="release", tokens=10**9).optim.adamw_warmup_steps == 0


def test_flags_switch_off_single_pieces_of_nanochats_trunk() -> None:
    for name, value in TRUNKS["paper"].items():
        without = resolve("quickstart", {f"model.{name}": value}, recipe="nanochat_trunk").model
        assert getattr(without, name) == value


def test_the_tuned_rate_of_matrices_falls_with_the_length_of_a_run_as_far_as_it_was_measured() -> None:
    rates = {20: 0.06, 250: 0.06, 500: 0.035, 1000: 0.02, 2000: 0.014, 5000: 0.01}
    assert {steps: resolve("quickstart", {"train.steps": steps}).optim.matrix_lr for steps in rates} == rates
    assert resolve("quickstart", {"train.steps": 250, "optim.matrix_lr": 0.03}).optim.matrix_lr == 0.03


@pytest.mark.skipif(not PAPER.is_file(), reason="../shared/paper is absent")
def test_reported_results_are_quoted_from_the_paper() -> None:
    text = re.sub(r"\\textbf\{|\\textit\{|\}", "", PAPER.read_text(encoding="utf-8"))
    for name, recipe in RECIPES.items():
        loss, core = recipe.reported.cross_entropy, recipe.reported.core
        if loss is not None:
            assert re.search(rf"& *{loss:.3f} *& *{core}", text), name
        if recipe.reported.train_cross_entropy is not None:
            assert f"{recipe.reported.train_cross_entropy:.3f}" in text, name


@given(st.sampled_from(list(RECIPES)), st.sampled_from(list(RUNS)), st.integers(1, 40_000))
def test_a_recipe_is_scaled_to_any_preset_and_budget(name: str, preset: str, steps: int) -> None:
    base = resolve(preset)
    per_step = tokens(base) // base.train.steps
    config = resolve(preset, recipe=name, tokens=steps * per_step + per_step // 2)
    assert config.train.steps == steps
    assert tokens(config) == steps * per_step
    share = min(steps / PAPER_STEPS, 1)
    assert config.train.eval_every == max(1, round(250 * share))
    rule = config.model.rule
    if isinstance(rule, ExpertThreshold):
        assert rule.warmup_steps in (0, min(4000, steps // 5), 4000)
        assert rule.warmup_steps <= max(steps, 4000 * (steps >= PAPER_STEPS))
    others = ("release", "better_rates", "nanochat", "nanochat_trunk", "tuned")
    if isinstance(rule, ExpertThreshold | ExpertChoice) and name not in others:
        assert rule.decay == scaled_decay(0.999, steps)
    require_pools_fit(config.model, config.train)
    assert run_config(json.loads(json.dumps(config.to_dict()))) == config
    pool, whole = window(config)[0], window(of_paper(name))[0]
    assert (pool is None) == (whole is None)
    if pool is not None and RECIPES[name].pool is not None:
        sequences = config.train.batch_size * config.train.accumulation
        assert pool == min(RECIPES[name].pool or 0, sequences) * config.model.context


def test_a_decay_remembers_the_same_share_of_a_run() -> None:
    assert scaled_decay(0.999, PAPER_STEPS) == scaled_decay(0.999, 10**6) == 0.999
    assert scaled_decay(0.999, 1907) == pytest.approx(0.99, abs=1e-4)
    assert scaled_decay(0.99, 1907) == scaled_decay(0.999, 10) == 0.9


def test_flags_go_before_the_recipe_and_its_preset_is_the_papers() -> None:
    config = resolved("--recipe d20_expert_threshold --rule.decay 0.95 --matrix-lr 0.01")
    assert config.model.layers == 20
    assert (config.model.rule.decay, config.optim.matrix_lr) == (0.95, 0.01)
    small = resolved("quickstart --recipe d20_expert_threshold --data x.txt")
    assert (small.model.layers, small.data.source) == (4, "x.txt")
    assert resolve("quickstart", recipe="expert_threshold").data.source == "embedded"


def test_a_file_goes_before_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text('{"rule": {"name": "expert_choice"}, "train": {"steps": 9}}')
    config = resolved(f"tiny --recipe expert_threshold --config {file}")
    assert isinstance(config.model.rule, ExpertChoice)
    assert config.train.steps == 9
    assert resolved(f"tiny --config {file} --tokens 20480").train.steps == 10


def test_a_budget_without_a_recipe_scales_the_presets_intervals() -> None:
    base = resolve("d6").train
    half = resolve("d6", tokens=tokens(resolve("d6")) // 2).train
    assert (half.steps, half.eval_every, half.checkpoint_every) == (base.steps // 2, 125, 500)


def test_et_recipes_lists_them_all() -> None:
    table = said("recipes")
    rows = {row["name"]: row for row in json.loads(said("recipes", "--json"))}
    assert rows.keys() == RECIPES.keys()
    for name in RECIPES:
        assert name in table
    for text in ("64k", "524M", "2.844", "19.876", "25.14", "11.2B"):
        assert text in table
    assert rows["expert_threshold"]["pool"] == 512 * K
    assert rows["expert_threshold"]["paper"]["cross_entropy"] == 2.844

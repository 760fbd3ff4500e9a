"""Whole runs: what presets are, how they scale, and what changes them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_threshold.config import KINDS, RECORDS, RUNS, by_path, resolve, run_config, scaled_optim, scaled_rule
from expert_threshold.model import PRESETS, TRUNKS, GPTConfig
from expert_threshold.option import describe
from expert_threshold.routing import RULES, ExpertThreshold, TokenChoice, option_names, rule_name
from expert_threshold.routing.cutoffs import PAPER_STEPS, scaled_decay
from expert_threshold.routing.expert_threshold import SHORT_RUN

RULE_NAMES = ("dense", *RULES)


def test_every_model_size_has_a_run_and_every_run_a_model_size() -> None:
    assert RUNS.keys() == PRESETS.keys()


@pytest.mark.parametrize("preset", RUNS)
@pytest.mark.parametrize("rule", RULE_NAMES)
def test_every_preset_goes_with_every_rule_and_survives_json(preset: str, rule: str) -> None:
    config = resolve(preset, {"rule.name": rule})
    assert rule_name(config.model.rule) == rule
    trunk = TRUNKS["tuned"] | {"initialization": "nanochat"} if preset == "quickstart" else {}
    assert GPTConfig.preset(preset, rule=config.model.rule, **trunk) == config.model
    assert run_config(json.loads(json.dumps(config.to_dict()))) == config


def test_a_preset_with_a_recipe_has_its_optimizer_and_another_recipe_replaces_it() -> None:
    chosen, named = resolve("quickstart"), resolve("quickstart", recipe="tuned")
    assert (chosen.optim, chosen.model) == (named.optim, named.model)
    paper = resolve("quickstart", recipe="expert_threshold")
    assert {name: getattr(paper.model, name) for name in TRUNKS["paper"]} == TRUNKS["paper"]
    assert paper.optim == scaled_optim(1200, matrix_lr=0.012, embed_lr=0.08)


@given(steps=st.integers(1, 100_000))
def test_what_is_scaled_stays_in_its_bounds_and_grows_with_the_run(steps: int) -> None:
    short, longer = (scaled_rule("expert_threshold", n, estimator="mean") for n in (steps, steps + 1))
    assert 0 <= short.warmup_steps <= longer.warmup_steps <= 4000
    assert 0.9 <= short.decay <= longer.decay <= 0.999
    assert short.warmup_steps <= steps / 5 or steps >= PAPER_STEPS
    optim = scaled_optim(steps)
    assert optim.adamw_warmup_steps <= min(250, steps / 10)
    assert optim.momentum_warmup_steps <= min(300, steps / 10)


def test_cutoffs_of_short_runs_follow_the_trend_unless_options_of_the_mean_are_given() -> None:
    for steps, options, estimator in (
        (SHORT_RUN, {}, "trend"),
        (SHORT_RUN + 1, {}, "mean"),
        (100, {"decay": 0.9}, "mean"),
        (100, {"debias": False}, "mean"),
        (100, {"estimator": "mean"}, "mean"),
        (PAPER_STEPS, {"estimator": "trend"}, "trend"),
    ):
        rule = scaled_rule("expert_threshold", steps, **options)
        assert rule.estimator == estimator
        assert "decay" in options or rule.decay == (0.6 if estimator == "trend" else scaled_decay(0.999, steps))
    recipe = resolve("tiny", recipe="expert_threshold").model.rule
    assert recipe.estimator == "mean"


def test_an_option_that_is_given_is_not_scaled() -> None:
    assert scaled_rule("expert_threshold", 100, decay=0.5, warmup_steps=7) == ExpertThreshold(decay=0.5, warmup_steps=7)
    assert scaled_optim(100, adamw_warmup_steps=99).adamw_warmup_steps == 99


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_an_option_that_the_rule_lacks_is_refused_by_both_names(rule: str) -> None:
    for option in {name for other in RULES for name in option_names(other)} - set(option_names(rule)):
        with pytest.raises(ValueError, match=rf"^rule.{option}: rule {rule} has no such option; leave it out, or use "):
            scaled_rule(rule, 100, **{option: 1})


def test_widths_that_are_not_given_follow_the_width_of_the_model() -> None:
    model = resolve("quickstart", {"model.d_model": 512}).model
    assert (model.d_expert, model.d_feed_forward, model.heads, model.kv_heads) == (1024, 2048, 8, 8)
    model = resolve("d6", {"model.heads": 2}).model
    assert (model.heads, model.kv_heads, model.d_expert) == (2, 2, 768)
    model = resolve("quickstart", {"model.d_model": 512, "model.d_expert": 100, "model.kv_heads": 4}).model
    assert (model.d_expert, model.heads, model.kv_heads) == (100, 8, 4)


def test_arguments_override_the_file_and_the_file_overrides_the_preset() -> None:
    file = {"train": {"steps": 50, "seed": 3}, "rule": {"name": "token_choice", "balance": "aux"}}
    config = resolve("tiny", by_path(file), {"train.seed": 4, "rule.bias_rate": 0.1})
    assert (config.train.steps, config.train.seed) == (50, 4)
    assert config.train.batch_size == resolve("tiny").train.batch_size
    assert config.model.rule == TokenChoice(balance="aux", bias_rate=0.1)


def test_another_rule_takes_only_the_layers_sizes_from_the_files_rule() -> None:
    options = {"rule.num_experts": 8, "rule.experts_per_token": 2, "rule.decay": 0.5}
    recorded = by_path(resolve("tiny", options).to_dict())
    config = resolve("tiny", recorded, {"rule.name": "expert_choice"})
    assert config.model.rule == scaled_rule("expert_choice", config.train.steps, num_experts=8, experts_per_token=2)
    assert resolve("tiny", recorded, {"rule.name": "dense"}).model.rule is None


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"trian": {}}, r"unknown section 'trian'; use model, rule, data, optim, train"),
        ({"train": 3}, r"section 'train' must be a JSON object of options, not 3"),
        ({"train": {"stepz": 3}}, r"unknown option train.stepz; did you mean train.steps\?"),
        ({"optim": {"zzz": 3}}, r"unknown option optim.zzz; see et train --help-all"),
        ({"train": {"steps": "many"}}, "train.steps: expected a whole number of at least 1, not many"),
        ({"train": {"steps": True}}, r"train.steps: expected a whole number of at least 1, not True"),
        ({"train": {"device": "gpu"}}, "train.device: expected auto, cpu, cuda or mps, not gpu"),
        ({"optim": {"betas": ["a", "b"]}}, r"optim.betas: expected nanochat or 2 numbers of .*, not \['a', 'b'\]"),
        ({"optim": {"betas": [0.9]}}, r"optim.betas: expected nanochat or 2 numbers of .*, not \[0.9\]"),
        ({"optim": {"clip": "x"}}, r"optim.clip: expected a number above 0 and below 1e\+30, or none, not x"),
        ({"rule": "token_choice"}, r"section 'rule' must be a JSON object of options, not 'token_choice'"),
        ({"rule": {"name": None}}, r"rule.name: expected text, not None"),
        ({"rule": {"name": "best"}}, r"rule='best' is unknown; use one of dense, token_choice, "),
        ({"rule": {"name": "token_choice", "decay": 1}}, r"^rule.decay: rule token_choice has no such option"),
        ({"rule": {"name": "dense", "pool": "batch"}}, r"^rule.pool: rule dense has no such option"),
        ({"rule": {"name": "expert_threshold", "num_experts": [4]}}, r"^rule.num_experts: expected a whole number"),
    ],
)
def test_invalid_options_in_a_file_are_refused_by_name(file: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve("tiny", by_path(file))


@pytest.mark.parametrize("path", KINDS)
def test_what_an_option_does_not_allow_is_refused_with_its_value_and_what_it_allows(path: str) -> None:
    section, _, option = path.partition(".")
    message = f"{option}=Ellipsis must be {describe(KINDS[path])}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        RECORDS[section](**{option: ...})


def test_an_unknown_preset_and_an_incomplete_configuration_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown preset 'd13'; did you mean d12\?"):
        resolve("d13")
    with pytest.raises(ValueError, match=r"configuration has no section 'rule'"):
        run_config({"model": {}})


@pytest.mark.parametrize(("section", "name"), [("optim", "matrix_lr"), ("train", "steps"), ("model", "qk_scale")])
def test_a_number_beyond_every_type_is_refused(section: str, name: str) -> None:
    """A configuration file with 400 digits ended in an OverflowError."""
    with pytest.raises(ValueError, match=f"{section}.{name}: .*, not 1000"):
        resolve("tiny", {f"{section}.{name}": 10**400})

"""Pages and figures guess nothing about a rule and speak of no rule but those of the runs that are shown."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expert_threshold.analysis.figures import scores, training
from expert_threshold.analysis.figures.cutoffs import capacity, cutoffs_and_biases
from expert_threshold.analysis.figures.load import say_load_at_scale, say_load_balance, say_objective
from expert_threshold.analysis.figures.style import INK
from expert_threshold.analysis.plain import NotShownError, plain
from expert_threshold.analysis.records import Run
from expert_threshold.model import GPTConfig
from expert_threshold.routing import ExpertChoice, ExpertThreshold, QuantileBalancing, ReLU, Rule, TopP


def run_of(rule: Rule, recorded: dict[str, Any] | None = None) -> Run:
    """A run of three steps whose layers recorded the same numbers each time."""
    model = GPTConfig.preset("tiny", rule=rule, context=16)
    config = model.to_dict() | {"train": {"batch_size": 4, "accumulation": 1, "log_every": 1, "steps": 3, "seed": 0}}
    layers = {str(layer): recorded or {} for layer in range(model.dense_layers, model.layers)}
    train = [{"step": step, "split": "train", "layers": layers} for step in (1, 2, 3)]
    return Run(None, config, model, train, [], [], rule.label)  # type: ignore[arg-type]


def shown(*runs: Run, **others: Any) -> Any:
    """Material of some runs."""
    return SimpleNamespace(routed=list(runs), focus=runs[0], each=lambda what, items: items, **others)


class Trace:
    """Random scores of one layer."""

    layers, context = (1,), 16

    def __init__(self, run: Run, tokens: int) -> None:
        self.found = torch.randn(tokens, run.rule.num_experts, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.found)

    def scores(self, layer: int) -> torch.Tensor:
        return self.found


def reason(study: Any, *runs: Run) -> str:
    with pytest.raises(NotShownError) as error:
        study(shown(*runs))
    return str(error.value)


NO_CUTOFFS = (ReLU(), TopP(), QuantileBalancing())  # ReLU compares scores with 0, which nothing moves


@pytest.mark.parametrize("rule", [*NO_CUTOFFS, ExpertThreshold(), ExpertChoice()], ids=str)
def test_only_rules_that_move_cutoffs_have_them(rule: Rule) -> None:
    run, moves = run_of(rule), rule not in NO_CUTOFFS
    assert run.has_cutoffs == moves
    left_out = {e.title: e.caption for e in training.drawn(training.ROUTING, run) if e.figure is None}
    assert ("has no cutoffs" in left_out["Cutoffs"]) == (not moves)


def test_biases_and_bounds_are_those_of_the_rule() -> None:
    run = run_of(QuantileBalancing(16), {"bias": [0.5] * 16})
    assert reason(cutoffs_and_biases, run) == (
        "it compares cutoffs with biases, and these runs recorded only the biases of QB"
    )
    assert reason(cutoffs_and_biases, run_of(ReLU())).endswith("no run recorded either")
    assert reason(capacity, run_of(ReLU())) == "no run has capacity bounds"


@pytest.mark.parametrize("rule", [ExpertThreshold(16, 0.05), ExpertChoice(16, 0.05), ExpertChoice(1, 0.5)], ids=str)
def test_bounds_exist_for_experts_that_get_less_than_one_token_of_a_small_pool(rule: Rule) -> None:
    run = run_of(rule)
    assert run.bounds is not None
    assert run.bounds[1] >= 1
    assert run.has_bounds != rule.looks_ahead


def test_a_layer_that_routes_no_token_is_left_out_of_the_sentence() -> None:
    tag = {"method": "ET", "kind": "ET"}
    told = say_load_balance({"methods": [{**tag, "spread": [None, 1.5]}, {**tag, "method": "TC", "spread": [None]}]})
    assert told == "In the worst layer, the largest load divided by the mean is 1.50 in ET and – in TC."


def test_the_law_of_cutoffs_is_drawn_for_methods_with_different_pool_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the laws of 16 and 64 experts, which have different pool sizes, were averaged entry by entry."""
    monkeypatch.setattr(scores, "POOLS", 4)

    def traced(tokens: int, *rules: Rule) -> Any:
        runs = (replace(run_of(rule), method=f"{rule.num_experts} experts") for rule in rules)
        return shown(*runs, trace=lambda run: Trace(run, tokens))

    data = plain(scores.cutoff_law(traced(4096, ExpertThreshold(16), ExpertThreshold(64))))
    assert [entry["tokens"] for entry in data["methods"]] == [[64, 128, 256, 512], [256, 512]]
    (axes, _) = scores.draw_cutoff_law(data).axes
    laws = [line for line in axes.lines if line.get_color() == INK]
    assert [line.get_ydata().tolist() for line in laws] == [pytest.approx(e["law"]) for e in data["methods"]]
    assert scores.say_cutoff_law(data).endswith(".")

    data = scores.cutoff_law(traced(1024, ExpertThreshold(16), ExpertThreshold(64)))
    assert list(data["left_out"].values()) == ["it needs a trace of 4096 tokens or more; use a larger --tokens"]
    with pytest.raises(NotShownError, match="a trace of 1024 tokens or more"):
        scores.cutoff_law(traced(700, ExpertThreshold(16)))


def test_sentences_speak_of_no_rule_that_is_not_shown() -> None:
    tag = {"method": "ReMoE", "kind": "ReMoE"}
    load = {
        "experts": 16, "devices": [8], "at": 1024, "experts_share": 0.2, "reference": "d20",
        "methods": [{**tag, "exact": False, "by_devices": {"resampled": [1.5]}}],
    }  # fmt: skip
    objective = {"methods": [{**tag, "rule": 1.0, "population": 1.1, "shares": {"free": 0.91}, "load": 0.9}]}
    histogram = {"methods": [{**tag, "experts": [{"skewness": 0.1, "cutoff": None}] * 2}]}
    for text in (say_load_at_scale(load), say_objective(objective), scores.say_score_histograms(histogram)):
        assert not any(word in text for word in ("choice", "threshold", "dashed"))

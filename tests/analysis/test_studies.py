"""Studies behind the figures, against values worked by hand, brute force, and laws that random numbers obey.

They guess nothing about a rule, and speak of no rule but those of the runs that are shown.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expert_threshold.analysis.figures import FIGURES, cutoffs, load, scores, training
from expert_threshold.analysis.figures.activation import _means, _position_edges
from expert_threshold.analysis.figures.learning import _pools_gap, _reached
from expert_threshold.analysis.figures.load import Spread, _objectives, busiest, largest_of, resample, spread_of_windows
from expert_threshold.analysis.figures.scores import _slope, _spreads
from expert_threshold.analysis.figures.specialisation import draw_passage_intensity, lay_out
from expert_threshold.analysis.figures.style import INK, style
from expert_threshold.analysis.material import cut_windows
from expert_threshold.analysis.measures import best_expert_choice, best_token_choice
from expert_threshold.analysis.page import svg
from expert_threshold.analysis.plain import NotShownError, array, plain
from expert_threshold.analysis.records import Run
from expert_threshold.data import IGNORED
from expert_threshold.model import GPTConfig
from expert_threshold.routing import ExpertChoice, ExpertThreshold, QuantileBalancing, ReLU, Rule, TopP

CHANCE = np.random.Generator(np.random.PCG64(0))


def test_studies_have_unique_names_titles_and_docstrings() -> None:
    names = [study.name for study in FIGURES]
    assert len(set(names)) == len(names)
    assert all(study.title and study.compute.__doc__ for study in FIGURES)


# Learning.


def test_the_tokens_for_a_loss_lie_on_the_line_between_two_validations() -> None:
    curve = {"points": [[100, 4.0], [200, 3.0], [300, 3.5], [400, 2.0]]}
    losses = [4.1, 4.0, 3.25, 2.5, 2.0, 1.9]  # the rise between is not a loss that was lost
    np.testing.assert_array_equal(_reached(curve, losses), [np.nan, 100, 175, 350, 400, np.nan])


def test_the_gap_of_pools_is_between_losses_of_the_same_tokens(tmp_path: Path) -> None:
    pools = {"loss": 5.0, "causal_loss": 5.25}  # without the last rows
    validation = {"loss": 4.5, "training_pools": pools}
    (tmp_path / "evaluation.json").write_text(json.dumps({"step": 3, "validation": validation}))
    run: Any = SimpleNamespace(folder=SimpleNamespace(path=tmp_path, latest_checkpoint=lambda: 3))
    assert _pools_gap(run) == 0.25
    run.folder.latest_checkpoint = lambda: 4
    assert _pools_gap(run) is None


# Cutoffs.


def test_the_spread_of_the_kth_score_of_independent_tokens_follows_the_law() -> None:
    """Uses normal scores, whose density at the cutoff is known."""
    scores = torch.randn(16384, 8, generator=torch.Generator().manual_seed(0))
    sizes = [128, 512, 2048]
    by_token, by_text, law = (np.sqrt((part**2).mean(1)) for part in _spreads(scores, sizes, 1 / 8, 64))
    quantile = 1.1503
    density = math.exp(-(quantile**2) / 2) / math.sqrt(2 * math.pi)
    expected = [math.sqrt(7 / 64 / size) / density for size in sizes]
    np.testing.assert_allclose(law, expected, rtol=0.05)
    np.testing.assert_allclose(by_token, expected, rtol=0.12)
    np.testing.assert_allclose(by_text, expected, rtol=0.12)  # in text of independent tokens as well
    assert _slope(sizes, by_token) == pytest.approx(-0.5, abs=0.06)


def test_text_whose_tokens_are_alike_has_cutoffs_that_vary_more() -> None:
    windows = torch.randn(128, 1, 4, generator=torch.Generator().manual_seed(0)).expand(-1, 32, -1)
    scores = windows + 0.5 * torch.randn(128, 32, 4, generator=torch.Generator().manual_seed(1))
    by_token, by_text, _ = _spreads(scores.reshape(-1, 4), [256], 1 / 8, 32)
    assert by_text.mean() > 2 * by_token.mean()


def test_shares_of_experts_at_a_bound_belong_to_their_steps_and_count_both_bounds_after_warmup() -> None:
    """500 lines, more than are drawn; from step 300 on one of four experts is bounded, above and below in turn."""
    numbers = {"cutoff": 1.0, "batch_cutoff": 1.5, "cutoff_distance": 0.75, "usage": 0.25, "score_std": 2.0}
    same = {name: [number] * 4 for name, number in numbers.items()}
    free, full = [0.0] * 4, [0.0, 0.25, 0.0, 0.0]
    train = []
    for step in range(1, 501):
        above, below = (step >= 300 and step % 2) or step <= 100, step >= 300 and step % 2 == 0
        bounds = {"saturation": full if above else free, "starvation": full if below else free}
        train.append({"step": step, "steps": 1 + (step == 101), "layers": {"0": same | bounds}})
    run = SimpleNamespace(
        train=train, warmup_steps=100, target=0.25, layers=[0], has_cutoffs=True,
        rule=SimpleNamespace(looks_ahead=False), has_bounds=True, tag={"method": "ET", "kind": "expert_threshold"},
    )  # fmt: skip
    material: Any = SimpleNamespace(routed=[run])
    data = cutoffs.cutoff_stability(material)
    (entry,) = data["methods"]
    assert len(entry["steps"]) == len(entry["bound"]) < 500
    for step, share in zip(entry["steps"], entry["bound"], strict=True):
        assert np.isnan(share) if step <= 101 else share == (0.25 if step >= 300 else 0)
    assert entry["bound_share"] == pytest.approx(201 / 399 / 4)
    sentence = cutoffs.say_cutoff_stability(plain(data))
    assert "lie 0.750 from their running means, which is 37.5 % of the scores' standard deviation" in sentence
    assert "a capacity bound changed the load in 12.6 % of experts and intervals of 2 steps" in sentence
    run.has_bounds = False
    assert "capacity bound" not in cutoffs.say_cutoff_stability(plain(cutoffs.cutoff_stability(material)))


# Dynamic computation.


def test_means_by_place_are_those_of_the_tokens_there() -> None:
    means = _means(np.array([0, 0, 2, 2, 2]), np.array([1.0, 3.0, 5.0, 5.0, 8.0]), 4)
    np.testing.assert_array_equal(means, [2, np.nan, 6, np.nan])
    np.testing.assert_array_equal(_means(np.array([0, 2, 2]), np.array([1.0, 2.0, 4.0]), 3, 2), [np.nan, np.nan, 3])


@pytest.mark.parametrize("context", [1, 7, 16, 100, 2048])
def test_bins_of_positions_cover_the_window_once(context: int) -> None:
    edges = _position_edges(context)
    assert (edges[0], edges[-1]) == (0, context)
    assert (np.diff(edges) >= 1).all()
    assert edges[: min(16, context)].tolist() == list(range(min(16, context)))


# Load.


def test_independent_loads_are_spread_as_the_closed_form_says() -> None:
    loads = CHANCE.binomial(64, 1 / 16, size=(512, 32)).astype(float)
    spread = spread_of_windows(loads, 64)
    assert spread.usage == pytest.approx(1 / 16, rel=0.03)
    assert spread.clustering == pytest.approx(1, rel=0.05)
    assert spread.usage_spread < 0.05
    drawn = resample(loads, 1024, np.random.Generator(np.random.PCG64(1)))
    assert drawn.shape[1] == 4096
    assert drawn.mean() == pytest.approx(1024, rel=0.03)
    for experts, devices in ((16, 16), (4096, 4096), (4096, 64)):
        closed = spread.closed_form(1024, experts, devices)
        assert busiest(drawn[:, :experts], devices) - 1 == pytest.approx(closed - 1, rel=0.25)


def test_loads_that_never_vary_cost_nothing() -> None:
    loads = np.full((8, 16), 4.0)
    assert spread_of_windows(loads, 64) == Spread(1 / 16, 0, 0)
    assert busiest(resample(loads, 256, np.random.Generator(np.random.PCG64(0))), 64) == 1
    assert Spread(1 / 16, 0, 0).closed_form(256, 64, 64) == 1


def test_a_rule_and_its_optima_are_of_the_same_tokens() -> None:
    """The value of the whole trace was divided by the optimum of its first 512 tokens."""
    scores = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0)) * torch.linspace(1, 3, 4096)[:, None]
    assignment = torch.nn.functional.one_hot(scores.argmax(1), 8).bool()
    for start in range(0, 4096, 1024):
        assignment[start : start + 128] = best_token_choice(scores[start : start + 128], 1, 16)
    found = _objectives(scores, assignment)
    assert found is not None
    assert found["load"] == 1
    assert found["rule"] == pytest.approx(found["balanced"])
    assert _objectives(torch.ones(4096, 8), assignment) is None


def test_the_best_choice_of_each_batch_is_its_own_optimum() -> None:
    """With six experts, the optimum had a token fewer, by the rounding of the fanout."""
    scores = torch.randn(4, 126, 6, generator=torch.Generator().manual_seed(0))
    found = _objectives(scores.flatten(0, 1), best_expert_choice(scores, 23).flatten(0, 1))
    assert found is not None
    assert found["choice"] == found["rule"]


def test_a_persistent_imbalance_does_not_vanish_with_more_tokens() -> None:
    spread = Spread(usage=1 / 16, clustering=1, usage_spread=0.2)
    assert spread.closed_form(10**9, 256, 256) == pytest.approx(1 + 0.2 * largest_of(256), rel=1e-3)
    assert spread.closed_form(64, 256, 256) > spread.closed_form(1024, 256, 256)
    assert spread.closed_form(64, 256, 8) < spread.closed_form(64, 256, 256)


def test_the_largest_of_many_normals_is_where_simulation_finds_it() -> None:
    assert largest_of(1) == 0
    for count in (2, 16, 256):
        assert largest_of(count) == pytest.approx(CHANCE.normal(size=(4000, count)).max(1).mean(), abs=0.05)


# Streams and texts.


@given(st.lists(st.integers(0, 99), min_size=1, max_size=80), st.integers(1, 9), st.integers(2, 60))
def test_windows_are_the_stream_from_its_beginning(stream: list[int], context: int, tokens: int) -> None:
    windows = cut_windows(np.array(stream, np.uint16), context, tokens)
    flat = [*windows[:, :-1].flatten().tolist(), int(windows[-1, -1])]
    if IGNORED in flat:
        assert flat.index(IGNORED) == len(flat) - 1
        flat = flat[:-1]
    assert flat == stream[: len(flat)]
    read = windows[:, :-1].numel()
    assert read <= tokens
    assert read == min(tokens, len(stream)) or read > min(tokens, len(stream) - 1) - context
    for before, after in pairwise(windows):
        assert before[-1] == after[0]


@given(st.lists(st.text("ab \n\té", max_size=7), max_size=20), st.integers(4, 30))
def test_text_is_laid_out_in_order_within_its_columns(tokens: list[str], columns: int) -> None:
    placed = list(lay_out(tokens, columns))
    assert [each.token for each in placed] == sorted(each.token for each in placed)
    assert {each.token for each in placed} == set(range(len(tokens)))
    assert all(each.column + len(each.text) <= columns for each in placed)
    for before, after in pairwise(placed):
        beside = (before.line, before.column + len(before.text)) == (after.line, after.column)
        assert beside or (after.line == before.line + 1 and after.column == 0)


def test_any_script_is_text_in_a_figure_and_wide_characters_take_two_cells() -> None:
    """Characters that one font lacks were boxes, where browsers have others."""
    passage = {"name": "text", "tokens": ["日本", "語 ", "e\u0301", "\x07"], "values": [1, 2, 0, 1]}
    data = {"method": "ET", "kind": "expert_threshold", "passages": [passage]}
    assert [each.column for each in lay_out(passage["tokens"], 40)] == [0, 4, 7, 8]
    with style():
        drawn = svg(draw_passage_intensity(data), "text", "Text")
    for text in ("日本", "語", "e\u0301", "□"):
        assert f">{text}</text>" in drawn


def test_plain_numbers_are_strict_json_and_come_back_as_arrays(tmp_path: Path) -> None:
    data = {"a": np.array([[1 / 3, np.nan], [np.inf, 2]]), "b": torch.tensor([True]), 3: (np.int64(4), None, "x")}
    text = json.dumps(plain(data), allow_nan=False)
    assert json.loads(text) == {"a": [[0.333333, None], [None, 2.0]], "b": [True], "3": [4, None, "x"]}
    np.testing.assert_array_equal(array([[0.5, None]]), [[0.5, np.nan]])


# Rules.


def run_of(rule: Rule, recorded: dict[str, Any] | None = None) -> Run:
    """A run of three steps whose layers recorded the same numbers each time."""
    model = GPTConfig.preset("tiny", rule=rule, context=16)
    config = model.to_dict() | {"train": {"batch_size": 4, "accumulation": 1, "log_every": 1, "steps": 3, "seed": 0}}
    layers = {str(layer): recorded or {} for layer in range(model.dense_layers, model.layers)}
    train = [{"step": step, "split": "train", "layers": layers} for step in (1, 2, 3)]
    return Run(None, config, model, train, [], [], rule.label)  # type: ignore[arg-type]


def shown(*runs: Run, **others: Any) -> Any:
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
    told = reason(cutoffs.cutoffs_and_biases, run)
    assert told == "it compares cutoffs with biases, and these runs recorded only the biases of QB"
    assert reason(cutoffs.cutoffs_and_biases, run_of(ReLU())).endswith("no run recorded either")
    assert reason(cutoffs.capacity, run_of(ReLU())) == "no run has capacity bounds"


@pytest.mark.parametrize("rule", [ExpertThreshold(16, 0.05), ExpertChoice(16, 0.05), ExpertChoice(1, 0.5)], ids=str)
def test_bounds_exist_for_experts_that_get_less_than_one_token_of_a_small_pool(rule: Rule) -> None:
    run = run_of(rule)
    assert run.bounds is not None
    assert run.bounds[1] >= 1
    assert run.has_bounds != rule.looks_ahead


def test_a_layer_that_routes_no_token_is_left_out_of_the_sentence() -> None:
    spreads = {"ET": [None, 1.5], "TC": [None]}
    told = load.say_load_balance({"methods": [{"method": m, "kind": "ET", "spread": s} for m, s in spreads.items()]})
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
    at_scale = {
        "experts": 16, "devices": [8], "at": 1024, "experts_share": 0.2, "reference": "d20",
        "methods": [{**tag, "exact": False, "by_devices": {"resampled": [1.5]}}],
    }  # fmt: skip
    objective = {"methods": [{**tag, "rule": 1.0, "population": 1.1, "shares": {"free": 0.91}, "load": 0.9}]}
    histogram = {"methods": [{**tag, "experts": [{"skewness": 0.1, "cutoff": None}] * 2}]}
    said = load.say_load_at_scale(at_scale), load.say_objective(objective), scores.say_score_histograms(histogram)
    for text in said:
        assert not any(word in text for word in ("choice", "threshold", "dashed"))

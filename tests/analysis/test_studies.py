"""Studies behind the figures, against values worked by hand, brute force, and laws that random numbers obey."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expert_threshold.analysis.figures import FIGURES
from expert_threshold.analysis.figures.activation import _means, _position_edges
from expert_threshold.analysis.figures.cutoffs import cutoff_stability, say_cutoff_stability
from expert_threshold.analysis.figures.learning import _pools_gap, _reached
from expert_threshold.analysis.figures.load import Spread, _objectives, busiest, largest_of, resample, spread_of_windows
from expert_threshold.analysis.figures.scores import _slope, _spreads
from expert_threshold.analysis.figures.specialisation import draw_passage_intensity, lay_out
from expert_threshold.analysis.figures.style import style
from expert_threshold.analysis.material import cut_windows
from expert_threshold.analysis.measures import best_expert_choice, best_token_choice
from expert_threshold.analysis.page import svg
from expert_threshold.analysis.plain import array, plain
from expert_threshold.data import IGNORED

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
        train.append({"step": step, "layers": {"0": same | bounds}})
    run = SimpleNamespace(
        train=train, config={"train": {"log_every": 1}}, warmup_steps=100, target=0.25, layers=[0], has_cutoffs=True,
        rule=SimpleNamespace(looks_ahead=False), has_bounds=True, tag={"method": "ET", "kind": "expert_threshold"},
    )  # fmt: skip
    material: Any = SimpleNamespace(routed=[run])
    data = cutoff_stability(material)
    (entry,) = data["methods"]
    assert len(entry["steps"]) == len(entry["bound"]) < 500
    for step, share in zip(entry["steps"], entry["bound"], strict=True):
        assert np.isnan(share) if step <= 100 else share == (0.25 if step >= 300 else 0)
    assert entry["bound_share"] == pytest.approx(201 / 400 / 4)
    sentence = say_cutoff_stability(plain(data))
    assert "lie 0.750 from their running means, which is 37.5 % of the scores' standard deviation" in sentence
    assert "a capacity bound changed the load in 12.6 % of steps and experts" in sentence
    run.has_bounds = False
    assert "capacity bound" not in say_cutoff_stability(plain(cutoff_stability(material)))


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

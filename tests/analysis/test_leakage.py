"""Leakage of expert choice: Eq. 7 against whole numbers, the cutoff that tells a choice, and exhaustive search."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples.paper import leakage as script
from examples.paper.leakage import MoELayers, bound, decode, encode, leakage, limit, log2_choices
from hypothesis import given
from hypothesis import strategies as st

from expert_threshold.analysis.figures.style import style
from expert_threshold.cli import main as et

EXAMPLE = MoELayers(expansion=8, granularity=2, layers=9)  # the paper's: 9 layers, sparsity 2/16
models = st.builds(MoELayers, st.integers(2, 64), st.integers(1, 8), st.integers(1, 40))


def test_the_papers_example_leaks_at_least_50_bits_a_token_and_exactly_78() -> None:
    assert EXAMPLE.experts == 144
    assert bound(EXAMPLE) == pytest.approx(50.5, abs=0.05)
    assert leakage(EXAMPLE, 524_288) == pytest.approx(78.3, abs=0.05)
    assert limit(EXAMPLE) == pytest.approx(78.3, abs=0.05)


@given(st.integers(1, 3000), st.data())
def test_log2_choices_is_that_of_the_whole_number(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    assert log2_choices(n, k) == pytest.approx(math.log2(math.comb(n, k)), rel=1e-10, abs=1e-10)


@given(models, st.integers(1, 10**9))
def test_leakage_lies_between_the_papers_bound_and_the_limit_where_pools_divide(model: MoELayers, k: int) -> None:
    assert bound(model) < leakage(model, k * model.expansion) < limit(model) * (1 + 1e-12)


@given(models, st.integers(1, 10**9))
def test_leakage_per_token_approaches_a_constant_as_pools_grow(model: MoELayers, k: int) -> None:
    """Not superlinear: by Stirling, what is missing is ½ log2(2π·N·p·(1 − p)) / N per expert."""
    per_token = [leakage(model, factor * k * model.expansion) for factor in (1, 2, 4)]
    assert all(a < b * (1 + 1e-12) for a, b in pairwise(per_token))
    tokens, p = k * model.expansion, 1 / model.expansion
    missing = model.experts * math.log2(2 * math.pi * tokens * p * (1 - p)) / 2 / tokens
    slack = model.experts / k / tokens + 1e-12 * limit(model)
    assert limit(model) - per_token[0] == pytest.approx(missing, abs=slack)


choices = st.lists(st.booleans(), max_size=300)


@given(choices, st.fractions(0, 1).filter(lambda place: place < 1))
def test_every_cutoff_of_a_choice_tells_that_choice_and_nothing_else(choice: list[bool], place: Fraction) -> None:
    lower, upper = encode(choice)
    for cutoff in (lower, lower + place * (upper - lower)):
        decoded, _, left = decode(cutoff, len(choice))
        assert decoded == choice
        assert left == (lower, upper)
    if upper < 1:
        assert decode(upper, len(choice))[0] != choice


@given(choices)
def test_the_choice_told_is_that_of_expert_choice(choice: list[bool]) -> None:
    """The tokens taken are the k with the highest scores, and no two scores are equal."""
    _, scores, _ = decode(encode(choice)[0], len(choice))
    top = sorted(scores, reverse=True)[: sum(choice)]
    assert [score in top for score in scores] == choice
    assert len(set(scores)) == len(scores)


def test_comparing_with_greater_or_equal_fails_at_the_lower_end() -> None:
    """z = 1{r ≥ c}, as Algorithm 2 writes, takes the one token that this choice leaves."""
    lower, _ = encode([False])
    _, (score,), _ = decode(lower, 1)
    assert score == lower


@pytest.mark.parametrize(("tokens", "k"), [(n, k) for n in range(1, 5) for k in range(n + 1)])
def test_a_causal_decoder_needs_as_much_advice_as_there_are_choices(tokens: int, k: int) -> None:
    """Tries the 2ᴺ − 1 scores that a binary search can ask for."""
    assert script.least_advice(tokens, k, 2**tokens - 1) == math.comb(tokens, k)


def entropy_of(probabilities: Any) -> float:
    return -sum(p * math.log2(p) for p in probabilities if p > 0)


@given(
    st.integers(-1, 6),
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), min_size=1, max_size=5),
)
def test_the_bits_of_a_token_are_those_of_the_joint_distribution(
    room: int, elsewhere: list[int], futures: list[tuple[int, int]]
) -> None:
    """Every future with every draw, and every next token with every later one, all equally likely."""

    def informed(outcomes: list[tuple[object, bool]]) -> float:
        """I(known; taken)."""
        columns = (outcomes, *zip(*outcomes, strict=True))
        joint, *parts = (entropy_of([column.count(v) / len(column) for v in set(column)]) for column in columns)
        return sum(parts) - joint

    whole = [((place,), other + a + b < room) for (place, (a, b)), other in product(enumerate(futures), elsewhere)]
    # The next token is counted apart from what follows it, so each pairs with every other's ending.
    following = [(a, other + a + later < room) for (a, _), (_, later), other in product(futures, futures, elsewhere)]
    taken = [outcome for _, outcome in whole]
    pool, future, after = script._bits(room, np.sort(elsewhere), *np.array(futures).T)
    mean = sum(taken) / len(taken)
    assert pool == pytest.approx(entropy_of([mean, 1 - mean]), abs=1e-9)
    assert future == pytest.approx(informed(whole), abs=1e-9)
    assert after == pytest.approx(informed(following), abs=1e-9)
    assert -1e-9 <= future <= pool + 1e-9


def test_an_assignment_that_only_a_cutoff_decides_tells_nothing() -> None:
    rows = torch.randn(8, 16, 4, generator=torch.Generator().manual_seed(0))
    unbounded = script.Pool(others=3, k_min=0, k_max=10**6)
    assert not script.probe_layer(rows, [unbounded], torch.zeros(4)).any()


def test_sequence_pools_reveal_only_the_future_and_larger_pools_reveal_less() -> None:
    rows = torch.randn(16, 32, 4, generator=torch.Generator().manual_seed(0))
    found = script.probe_layer(rows, [script.Pool(n - 1, 4 * n, 4 * n) for n in (1, 4, 64)], None)
    assert found.min() > 0
    assert (np.diff(found, axis=0) < 0).all()
    pool, future, after = found.T
    assert pool[0] == pytest.approx(future[0])
    assert (after < future + 0.01).all()
    assert pool[0] > 0.1
    assert (pool <= 4).all()  # a bit for each expert


def test_what_leaks_nothing_has_no_entry_in_the_key() -> None:
    bits = {name: [0.1, 0.2, 0.3] for name in ("pool", "future", "next")}
    silent = {name: [0.0] * 3 for name in bits}
    tag = {"own": 64, "tokens": [64, 256, 1024], "kind": "other"}
    with style():
        figure = script.draw_leakage_probe([{**tag, "method": "EC", **bits}, {**tag, "method": "ET", **silent}])
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "EC" in texts
    assert "ET" not in texts


def test_every_line_in_the_key_of_the_bounds_is_in_sight() -> None:
    """The line N·log₂ N lay above the axes with four experts and one per token."""
    for expansion in (2, 4, 16):
        with style():
            axes = script.draw_leakage_bounds(MoELayers(expansion, 1, 2)).axes[0]
        for line in axes.lines:
            assert (np.asarray(line.get_ydata()) <= axes.get_ylim()[1]).sum() >= 2


def test_the_script_says_what_the_paper_and_a_run_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SAMPLES", "DRAWS"):
        monkeypatch.setattr(script, name, 8)
    rule, sizes = ["--rule", "expert_choice", "--rule.pool", "sequence"], ["--steps", "2", "--batch-size", "2"]
    assert et(["train", "tiny", *rule, *sizes, "--eval-every", "none", "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    script.main([str(tmp_path / "run"), "--tokens", "512", "--out", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "never more than 78.3" in said
    assert "the paper's bound is 50.5" in said
    assert re.search(r"EC 128: in training, with pools of 128 tokens, the assignment of a token leaks \S+ bits", said)
    assert all((tmp_path / "out" / f"leakage_{name}.svg").is_file() for name in ("bounds", "probe"))
    with pytest.raises(SystemExit) as refused:
        script.main(["--experts-per-token", "5"])
    assert refused.value.code == 2

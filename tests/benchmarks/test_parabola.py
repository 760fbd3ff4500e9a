"""`benchmarks/parabola.py`: how flat the optima of planted losses are, and what no trials show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from benchmarks.parabola import Scale, better_trials, fit_optima, table

from expert_threshold.compare.sweep import Trial


def trial(number: int, loss: float | None, **options: Any) -> Trial:
    return Trial(number, "finished" if loss is not None else "pruned", options, loss, [], 1.0, None, False)


def planted(count: int = 60, noise: float = 0.0) -> list[Trial]:
    """Losses 3 + 0.05 (log a/0.02)² + 0.2 (b − 0.5)², far trials worse than any parabola."""
    random = np.random.default_rng(0)
    trials = []
    for number in range(count):
        a, b = float(np.exp(random.uniform(np.log(0.002), np.log(0.2)))), float(random.uniform(0, 1))
        loss = 3 + 0.05 * math.log(a / 0.02) ** 2 + 0.2 * (b - 0.5) ** 2 + noise * float(random.standard_normal())
        trials.append(trial(number, loss if abs(math.log(a / 0.02)) < 1.5 else loss + 1, a=a, b=b))
    return trials


SCALES = {"a": Scale(0.002, 0.2, log=True), "b": Scale(0, 1, log=False)}


@pytest.mark.parametrize("noise", [0.0, 0.001])
def test_the_flatness_of_a_planted_parabola_is_found(noise: float) -> None:
    a, b = fit_optima(planted(noise=noise), SCALES).values()
    assert a.best == pytest.approx(0.02, rel=1e-6 + 30 * noise)
    assert b.best == pytest.approx(0.5, rel=1e-6 + 30 * noise)
    reach = math.sqrt(0.005 / 0.05)
    assert math.log(a.high / a.best) == pytest.approx(reach, rel=1e-6 + 50 * noise)
    assert math.log(a.best / a.low) == pytest.approx(reach, rel=1e-6 + 50 * noise)
    assert b.high - b.best == pytest.approx(math.sqrt(0.005 / 0.2), rel=1e-6 + 50 * noise)


def test_few_trials_need_a_curvature_of_more_standard_errors() -> None:
    """Noise around a line: with 2 degrees of freedom a curvature passes two of its standard errors in 9 % of cases."""
    random = np.random.default_rng(0)
    claimed = 0
    for _ in range(400):
        losses = 3 + 0.01 * random.standard_normal(5)
        trials = [trial(n, loss, b=n / 4) for n, loss in enumerate(losses.tolist())]
        claimed += fit_optima(trials, {"b": Scale(-1e9, 1e9, log=False)})["b"] is not None
    assert claimed <= 20  # 2.5 % of 400 are expected


def test_no_optimum_is_claimed_where_the_trials_show_none() -> None:
    def of(losses: Mapping[float, float]) -> Any:
        return fit_optima([trial(n, loss, a=a) for n, (a, loss) in enumerate(losses.items())], {"a": SCALES["a"]})["a"]

    rates = [0.002 * 1.3**n for n in range(16)]
    assert of({a: 3 - 0.005 * math.log(a / 0.002) ** 2 for a in rates}) is None  # bent the other way
    assert of({a: 3 + 0.005 * math.log(a / 0.9) ** 2 for a in rates}) is None  # beyond the range
    assert of({a: 3 + 0.005 * math.log(a / 0.1) ** 2 for a in rates}) is not None
    flat = dict(zip(rates, np.random.default_rng(1).normal(3, 0.01, 16).tolist(), strict=True))
    assert of(flat) is None  # noise
    assert of(dict.fromkeys(rates[:4], 3.0)) is None  # too few
    assert fit_optima([], {}) == {}


def test_a_trial_that_failed_does_not_bend_the_parabola() -> None:
    """Where trials were few, losses far above entered the fit, and it promised a loss below any that was measured."""
    rates = (0.008, 0.012, 0.018, 0.03, 0.05)
    trials = [trial(n, 3 + 0.05 * math.log(a / 0.02) ** 2, a=a) for n, a in enumerate(rates)]
    found = fit_optima([*trials, trial(5, 5.0, a=0.15)], {"a": SCALES["a"]})
    assert found == fit_optima(trials, {"a": SCALES["a"]})
    assert found["a"].best == pytest.approx(0.02)


def test_an_option_that_hardly_changes_the_loss_is_equally_good_in_its_whole_range() -> None:
    """The ends of the flat range lay beyond the largest number, and the sweep ended with a traceback."""
    values = {math.exp(place): 3 + 1e-12 * place**2 for place in np.linspace(-3, 3, 12)}
    scales = {"a": Scale(math.exp(-3), math.exp(3), log=True)}
    found = fit_optima([trial(n, loss, a=a) for n, (a, loss) in enumerate(values.items())], scales)["a"]
    assert (found.low, found.high) == pytest.approx((scales["a"].low, scales["a"].high), rel=1e-12)


def test_a_repeated_trial_is_one_measurement() -> None:
    """Five different values, tried 14 times, were fitted as 7 trials with a residual of 2e-14."""
    losses = {1: 3.01, 2: 3.0, 3: 3.02, 4: 3.03, 5: 3.0}
    once = [trial(n, loss, a=a) for n, (a, loss) in enumerate(losses.items())]
    again = [trial(n, losses[a], a=a) for n, a in enumerate([2, 5, 5, 2, 5, 1, 2, 2, 1], start=5)]
    scales = {"a": Scale(1, 5, log=False)}
    assert len(better_trials(once + again, 3)) == 5
    assert fit_optima(once + again, scales) == fit_optima(once, scales)


def test_the_table_of_a_study_has_the_optimum_of_each_numeric_option() -> None:
    entries = {"a": {"scale": SCALES["a"]._asdict()}, "b": {"scale": SCALES["b"]._asdict()}, "choice": {"scale": None}}
    study = {"options": entries, "trials": [each._asdict() for each in planted()]}
    assert table(study) == {"a": "0.02 (0.0146 to 0.0274)", "b": "0.5 (0.342 to 0.658)"}

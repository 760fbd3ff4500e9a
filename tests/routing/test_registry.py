"""The registry refuses classes that commands could not use, and converts whole numbers to int."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import Any

import pytest
import torch

from expert_threshold.config import resolve, scaled_rule
from expert_threshold.routing import RULES, Rule, observe, register_rule, rule_from_dict


class Still(Rule):
    """A rule whose methods are never called."""

    init = route = update = lambda *_, **__: None  # type: ignore[assignment]


@dataclass(frozen=True)
class Plain(Still):
    num_experts: int = 4
    experts_per_token: int = 2


def rule_class(name: str, *fields: Any, bases: tuple[type, ...] = (Plain,)) -> Any:
    return make_dataclass(name, fields, bases=bases, frozen=True)


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (rule_class("Windowed", ("window", int, 9)), "option window shadows"),
        (rule_class("Named", ("name", str, "x")), "option name shadows"),
        (rule_class("Derived", ("double", int, field(default=8, init=False))), "double is not an option"),
        (rule_class("Empty", ("num_experts", int, 0)), r"Empty\(\) must work without arguments"),
        (Still, "must be a frozen dataclass"),
        (rule_class("Unfinished", bases=(Rule,)), "Unfinished.*abstract"),
    ],
)
def test_a_class_that_commands_could_not_take_is_refused(cls: Any, words: str) -> None:
    """Regression: such a class was registered and then broke commands with other rules, too."""
    with pytest.raises(ValueError, match=words):
        register_rule("refused", cls)
    assert "refused" not in RULES


def test_a_subclass_without_a_decorator_of_its_own_is_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    class Renamed(Plain):
        label = "mine"

    monkeypatch.setattr(RULES, "_rules", dict(RULES))
    register_rule("renamed", Renamed)
    assert rule_from_dict({"name": "renamed", "num_experts": 8}) == Renamed(8)


def test_sizes_are_checked_for_a_rule_that_does_not_and_whole_ones_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: --experts-per-token 2 was read as 2.0, which `topk` does not accept."""
    monkeypatch.setitem(RULES._rules, "plain", Plain)  # type: ignore[attr-defined]
    assert type(rule_from_dict({"name": "plain", "experts_per_token": 2.0}).experts_per_token) is int
    wrong = [("experts_per_token", 1.5), ("experts_per_token", 99), ("num_experts", 0), ("num_experts", -3)]
    for option, value in wrong:
        with pytest.raises(ValueError, match=f"{option}={value} must be "):
            rule_from_dict({"name": "plain", option: value})


def test_a_tuple_stays_one_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    banded = rule_class("Banded", ("band", tuple[float, float], (0.1, 0.9)))
    monkeypatch.setitem(RULES._rules, "banded", banded)  # type: ignore[attr-defined]
    given = {"name": "banded", "band": [0.2, 0.8]}
    assert hash(rule_from_dict(given)) == hash(banded(band=(0.2, 0.8)))
    config = resolve(initial={f"rule.{name}": value for name, value in given.items()})
    assert config.model.rule == scaled_rule("banded", 1, band=(0.2, 0.8))


@pytest.mark.parametrize("name", ["load", "usage", "batch_cutoff", "count", "tensors"])
def test_a_sum_that_could_not_be_read_back_is_refused(name: str) -> None:
    """`observation.usage` is load over tokens whatever a rule sums under that name."""
    scores = torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match=name):
        observe(scores, scores > 0, **{name: torch.ones(3)})


def test_an_option_may_be_called_like_one_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with_steps = rule_class("WithSteps", ("steps", int, 3))
    monkeypatch.setitem(RULES._rules, "with_steps", with_steps)  # type: ignore[attr-defined]
    assert scaled_rule("with_steps", 100, steps=7) == with_steps(steps=7)

"""The registry of named rules and their JSON form. Other distributions add rules with `register_rule` or the
entry-point group `expert_threshold.rules`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from importlib.metadata import entry_points
from typing import Any

from .expert_choice import ExpertChoice
from .expert_threshold import ExpertThreshold
from .null_slots import NullSlots
from .quantile_balancing import QuantileBalancing
from .relu import ReLU
from .rule import Rule
from .seq_top_k import SeqTopK
from .token_choice import TokenChoice
from .top_p import TopP

GROUP = "expert_threshold.rules"
DENSE = "dense"
"""The name that stands for no rule, in a model without routed experts."""


def has_own_fields(cls: type[Rule]) -> bool:
    """Return True if the rule, or a class between it and Rule, is a dataclass."""
    return any("__dataclass_fields__" in vars(each) for each in cls.__mro__[: cls.__mro__.index(Rule)])


class _Registry(Mapping[str, type[Rule]]):
    """A mapping from names to rules. Rules of other installed distributions are loaded on first access."""

    def __init__(self, own: Mapping[str, type[Rule]]) -> None:
        self._rules = dict(own)
        self._looked = False

    def add(self, name: str, cls: Any) -> None:
        if not re.fullmatch("[a-z][a-z0-9_]*", name) or name == DENSE:
            raise ValueError(f"rule name {name!r} must be a lower-case identifier other than {DENSE!r}")
        if not (isinstance(cls, type) and issubclass(cls, Rule) and has_own_fields(cls)):
            raise ValueError(f"rule {name}: {cls!r} must be a frozen dataclass derived from Rule")
        for field in fields(cls):
            if field.name == "name" or callable(getattr(Rule, field.name, None)):
                raise ValueError(f"rule {name}: option {field.name} shadows an attribute of Rule; rename it")
            if not field.init:
                raise ValueError(f"rule {name}: {field.name} is not an option (init=False); make it a property")
        try:
            cls()
        except Exception as error:  # whatever a constructor raises
            raise ValueError(f"rule {name}: {cls.__name__}() must work without arguments: {error}") from error
        if self._rules.get(name, cls) is not cls:
            raise ValueError(f"rule name {name!r} is already taken; choose another")
        self._rules[name] = cls

    def _all(self) -> dict[str, type[Rule]]:
        if not self._looked:
            self._looked = True
            for entry in entry_points(group=GROUP):
                try:
                    self.add(entry.name, entry.load())
                except Exception as error:  # another distribution's module may raise anything
                    warnings.warn(f"rule {entry.name} of {entry.value} was skipped: {error}", stacklevel=2)
        return self._rules

    def __getitem__(self, name: str) -> type[Rule]:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


RULES = _Registry(
    {
        "token_choice": TokenChoice,
        "expert_choice": ExpertChoice,
        "expert_threshold": ExpertThreshold,
        "quantile_balancing": QuantileBalancing,
        "null_slots": NullSlots,
        "relu": ReLU,
        "top_p": TopP,
        "seq_top_k": SeqTopK,
    }
)


def register_rule(name: str, cls: type[Rule]) -> None:
    """Register a rule, so that every command accepts its name.

    Raises ValueError if the name is taken or not an identifier, or if the class is not a frozen dataclass derived from
    Rule whose fields all have defaults and share no name with a method of Rule.
    """
    RULES.add(name, cls)


def rule_name(rule: Rule | None) -> str:
    """Return the rule's registered name, or 'dense' for None. Raises ValueError if the rule is not registered."""
    if rule is None:
        return DENSE
    for name, cls in RULES.items():
        if type(rule) is cls:
            return name
    raise ValueError(
        f"rule {type(rule).__name__} is not registered, so no file can name it; call register_rule('name', "
        f"{type(rule).__name__}) first"
    )


def rule_to_dict(rule: Rule | None) -> dict[str, Any]:
    """Return the rule's name and options as a JSON object. Raises ValueError if the rule is not registered."""
    return {"name": rule_name(rule)} | ({} if rule is None else asdict(rule))


def option_names(name: str) -> tuple[str, ...]:
    """Return the names of a rule's options. Raises ValueError if the rule is unknown."""
    if name == DENSE:
        return ()
    if not isinstance(name, str) or name not in RULES:
        raise ValueError(f"rule={name!r} is unknown; use one of {DENSE}, {', '.join(RULES)}")
    return tuple(field.name for field in fields(RULES[name]))


def require_option(name: str, option: str) -> None:
    """Raise ValueError if the rule is unknown or lacks the option. The message names the rules that have the option."""
    known = option_names(name)
    if option not in known:
        having = [other for other in RULES if option in option_names(other)]
        remedy = f"leave it out, or use {' or '.join(having)}" if having else f"it has {', '.join(known) or 'none'}"
        raise ValueError(f"rule.{option}: rule {name} has no such option; {remedy}")


def rule_from_dict(record: Mapping[str, Any]) -> Rule | None:
    """Return the rule described by `{"name": …, option: value, …}`. Raises ValueError on an unknown name or option."""
    if not isinstance(record, Mapping):
        raise ValueError(f'rule={record!r} must be an object such as {{"name": "expert_threshold"}}')
    options = dict(record)
    name = options.pop("name", None)
    option_names(name)
    for option in options:
        require_option(name, option)
    if name == DENSE:
        return None
    rule = RULES[name](**options)
    Rule.__post_init__(rule)  # even if the class overrides it
    return rule

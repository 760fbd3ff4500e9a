"""Options of configuration records: dataclass fields with a help text and bounds, read from text and checked."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from difflib import get_close_matches
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class Bounds(NamedTuple):
    """Bounds of a number; None is unbounded. `Annotated[int, Bounds(least=1)]` is the type of the numbers within."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def hold(self, value: float) -> bool:
        """Return True if the value is within the bounds."""
        tests = zip((operator.ge, operator.gt, operator.le, operator.lt), self, strict=True)
        return all(bound is None or test(value, bound) for test, bound in tests)

    def __str__(self) -> str:
        words = zip(("of at least", "above", "at most", "below"), self, strict=True)
        return " and ".join(f"{word} {bound}" for word, bound in words if bound is not None)


Count = Annotated[int, Bounds(least=1)]
NonNegativeInt = Annotated[int, Bounds(least=0)]
Positive = Annotated[float, Bounds(above=0)]
Minutes = Annotated[float, Bounds(above=0, below=1e7)]
NonNegative = Annotated[float, Bounds(least=0)]
Decay = Annotated[float, Bounds(least=0, below=1)]
"""The share of the old value that a running mean keeps."""
Share = Annotated[float, Bounds(above=0, most=1)]


def option(default: T, help: str) -> T:
    """Return a dataclass field with this default; `--help` shows the text, one or two sentences."""
    return field(default=default, metadata={"help": help})


def require_valid(record: type, values: Mapping[str, Any]) -> None:
    """Raise ValueError for the first of a record's options that is unknown, of the wrong type or out of bounds.

    Fields that are not made by `option` may have any value.
    """
    kinds, known = kinds_of(record), {field.name: field for field in fields(record)}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"option {name!r} is unknown; {did_you_mean(name, known)}")
        if known[name].metadata:
            require_kind(name, value, kinds[name])


def require_kind(name: str, value: Any, kind: Any) -> None:
    """Raise ValueError unless the type of the option `name`, with its bounds, allows the value."""
    if not allows(kind, value):
        raise ValueError(f"{name}={value!r} must be {describe(kind)}")


@functools.cache
def kinds_of(record: type) -> dict[str, Any]:
    """Return the types of a record's fields, with their bounds."""
    return get_type_hints(record, include_extras=True)


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types and literal values that a field's type allows, each once, literals first: `Literal["a"] | int`
    gives ("a", int).
    """
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        found = [alternative for part in get_args(kind) for alternative in alternatives(part)]
        return tuple(sorted(dict.fromkeys(found), key=lambda alternative: not isinstance(alternative, str)))
    return (kind,)


def bare(alternative: Any) -> tuple[Any, Bounds]:
    """Return a type without its bounds, and the bounds."""
    if get_origin(alternative) is Annotated:
        return get_args(alternative)
    return alternative, Bounds()


def describe(kind: Any) -> str:
    """Return a field's type in words."""
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "none"}
    parts = []
    for plain, bounds in map(bare, alternatives(kind)):
        if get_origin(plain) is tuple:
            within = f", each {bounds}" if str(bounds := bare(get_args(plain)[0])[1]) else ""
            parts.append(f"{len(get_args(plain))} numbers such as {','.join('0.9' for _ in get_args(plain))}{within}")
        else:
            parts.append(f"{words.get(plain, plain)} {bounds}".rstrip())
    return " or ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def allows(kind: Any, value: Any) -> bool:
    """Return True if a field's type, with its bounds, allows the value; no text may be empty, no number infinite."""
    return any(_allows(alternative, value) for alternative in alternatives(kind))


def _allows(alternative: Any, value: Any) -> bool:
    kind, bounds = bare(alternative)
    if isinstance(kind, str):
        return bool(value == kind)
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        return isinstance(value, list | tuple) and len(value) == len(kinds) and all(map(_allows, kinds, value))
    if kind in (int, float):
        number: Any = Integral if kind is int else Real
        largest = sys.maxsize if kind is int else sys.float_info.max
        return (
            isinstance(value, number) and not isinstance(value, bool) and abs(value) <= largest and bounds.hold(value)
        )
    return type(value) is kind and value != ""


WORDS = {"none": None, "true": True, "false": False}


def parse_value(kind: Any, text: str) -> Any:
    """Return the value of a field's type that the text, as typed, stands for. Raises ValueError if there is none."""
    for alternative in sorted(alternatives(kind), key=lambda alternative: alternative is str):  # any text is a str
        plain = bare(alternative)[0]
        value: Any = text
        with contextlib.suppress(ValueError):
            if plain in (int, float):
                value = plain(text)
            elif plain in (bool, type(None)):
                value = WORDS.get(text.lower(), text)
            elif get_origin(plain) is tuple:
                parts = zip(get_args(plain), text.split(","), strict=True)
                value = tuple(parse_value(part, each) for part, each in parts)
        if _allows(alternative, value):
            return value
    near = did_you_mean(text, map(str, alternatives(kind)), otherwise="")
    raise ValueError(f"expected {describe(kind)}, not {text}{near and f'; {near}'}")


def did_you_mean(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """Return a remedy for an unknown name: the known one that is close, else `otherwise`, or all of them.

    Paths such as --optim.clip are compared by their last part.
    """
    known = list(known)
    last = {each.rpartition(".")[2].lstrip("-"): each for each in reversed(known)}
    near = get_close_matches(name.rpartition(".")[2].lstrip("-"), last, 1)
    if near:
        return f"did you mean {last[near[0]]}?"
    return f"there are {', '.join(known)}" if otherwise is None else otherwise

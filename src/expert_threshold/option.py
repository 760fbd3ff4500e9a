"""Options are dataclass fields with a help text and bounds in their types. Values are checked and parsed from text."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from difflib import get_close_matches
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class Bounds(NamedTuple):
    """Bounds of a number. `Annotated[int, Bounds(least=1)]` is the type of positive integers."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def hold(self, value: float) -> bool:
        """Return True if the value is within the bounds."""
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        words = zip(("of at least", "above", "at most", "below"), self, strict=True)
        return " and ".join(
            f"{word} {bound:{',' if bound >= 1e6 else ''}}" for word, bound in words if math.isfinite(bound)
        )


Count = Annotated[int, Bounds(least=1)]
NonNegativeInt = Annotated[int, Bounds(least=0)]
Positive = Annotated[float, Bounds(above=0)]
Minutes = Annotated[float, Bounds(above=0, below=10**7)]
NonNegative = Annotated[float, Bounds(least=0)]
Decay = Annotated[float, Bounds(least=0, below=1)]
"""The share of the old value that a running mean keeps."""
Share = Annotated[float, Bounds(above=0, most=1)]


def option(default: T, help: str) -> T:
    """Return a dataclass field with this default and with one or two sentences of help for `--help`."""
    return field(default=default, metadata={"help": help})


@functools.cache
def kinds_of(record: Any) -> dict[str, Any]:
    """Return the types of a record's fields or of a function's arguments, including their bounds."""
    return get_type_hints(record, include_extras=True)


def require_valid(record: type, values: Mapping[str, Any]) -> None:
    """Raise ValueError for the first option that is unknown, has the wrong type or is out of bounds.

    Fields that are not defined with `option` may have any value.
    """
    known = {field.name: field for field in fields(record)}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"unknown option {name!r}; {did_you_mean(name, known)}")
        if known[name].metadata:
            require_kind(name, value, kinds_of(record)[name])


def require_kind(name: str, value: Any, kind: Any) -> None:
    """Raise ValueError unless `kind`, a type with bounds, allows this value for the option `name`."""
    if not any(_allows(plain, bounds, value) for plain, bounds in alternatives(kind)):
        raise ValueError(f"{name}={value!r} must be {describe(kind)}")


def alternatives(kind: Any) -> list[tuple[Any, Bounds]]:
    """Return the types and literal values that a field's type allows, each with its bounds. `Literal["a"] | Count`
    gives ("a", Bounds()) and (int, Bounds(least=1)).
    """
    if get_origin(kind) in (Union, UnionType):
        return [each for part in get_args(kind) for each in alternatives(part)]
    if get_origin(kind) is Literal:
        return [(name, Bounds()) for name in get_args(kind)]
    return [get_args(kind) if get_origin(kind) is Annotated else (kind, Bounds())]


def describe(kind: Any) -> str:
    """Return a field's type in words."""
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "none"}
    parts = []
    for plain, bounds in alternatives(kind):
        if get_origin(plain) is tuple:
            kinds = get_args(plain)
            within = f"{len(kinds)} numbers {alternatives(kinds[0])[0][1]}".rstrip()
            parts.append(f"{within} such as {','.join('0.9' for _ in kinds)}")
        else:
            parts.append(f"{words.get(plain, plain)} {bounds}".rstrip())
    comma = "," if any(" and " in part for part in parts[:-1]) else ""
    return f"{comma} or ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _allows(plain: Any, bounds: Bounds, value: Any) -> bool:
    """Return True if the value has this type and is within bounds. Empty text and infinite numbers are not allowed."""
    if isinstance(plain, str):
        return bool(value == plain)
    if get_origin(plain) is tuple:
        kinds = [alternatives(kind)[0] for kind in get_args(plain)]
        fits = isinstance(value, list | tuple) and len(value) == len(kinds)
        return fits and all(_allows(*kind, each) for kind, each in zip(kinds, value, strict=True))
    if plain in (int, float) and not isinstance(value, bool):
        number: Any = Integral if plain is int else Real
        largest = sys.maxsize if plain is int else sys.float_info.max
        return isinstance(value, number) and abs(value) <= largest and bounds.hold(value)
    return type(value) is plain and value != ""


def convert(kind: Any, value: Any) -> Any:
    """Convert a value from a file or the command line to the type of a field. Any value may be given as text.

    Raises ValueError if the type does not allow the value.
    """
    for plain, bounds in sorted(alternatives(kind), key=lambda each: each[0] is str):  # any text is a str
        with contextlib.suppress(ValueError):
            found = _read(plain, value)
            if _allows(plain, bounds, found):
                return found
    if value == "":
        raise ValueError(f"must not be empty; expected {describe(kind)}")
    near = did_you_mean(str(value), [name for name, _ in alternatives(kind) if isinstance(name, str)], otherwise="")
    raise ValueError(f"expected {describe(kind)}, not {value}{near and f'; {near}'}")


def _read(plain: Any, value: Any) -> Any:
    if plain is int and isinstance(value, float) and value.is_integer():
        return int(value)  # an option of another rule with the same name may be any number
    if not isinstance(value, str):
        return value
    if plain in (int, float):
        return plain(value)
    if plain in (bool, type(None)):
        return {"none": None, "true": True, "false": False}.get(value.lower(), value)
    return tuple(map(float, value.split(","))) if get_origin(plain) is tuple else value


def did_you_mean(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """Return a remedy for an unknown name: the closest known name, or else `otherwise` or a list of all names.

    Paths such as --optim.clip are compared by their last part.
    """
    known = list(known)
    last = {each.rpartition(".")[2].lstrip("-"): each for each in reversed(known)}
    near = get_close_matches(name.rpartition(".")[2].lstrip("-"), last, 1)
    if near:
        return f"did you mean {last[near[0]]}?"
    return f"choose from {', '.join(known)}" if otherwise is None else otherwise

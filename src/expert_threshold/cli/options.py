"""Options of a command: from the components' records to flags, and from a command line to values or one clear line."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, make_dataclass
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import tyro

from ..config import alternatives, describe

HELP_FLAGS = ("-h", "--help")
WIDEST = 60
"""Characters of values beside a flag; --help breaks what is wider in the middle of a word."""


class _RefusedError(Exception):
    """A value that cannot be understood; no ValueError, since tyro would draw a box around that."""


class Option(NamedTuple):
    """`--name VALUE`, or a positional argument NAME.

    kind: a type as records have them; bool makes a pair, --name and --no-name. default: what --help shows.
    many: an option, or the last positional argument, that may come more than once; its value is the list of texts.
    may_be_empty: an empty text means something; elsewhere it is what a shell makes of a variable that is not set.
    """

    name: str
    kind: Any
    default: Any
    help: str
    positional: bool = False
    required: bool = False
    many: bool = False
    may_be_empty: bool = False

    @property
    def flag(self) -> str:
        """As it is typed."""
        return self.name.upper() if self.positional else "--" + self.name.replace("_", "-")


class Command(NamedTuple):
    """prog: as it is typed, 'et train'. groups: the options under the titles that --help shows."""

    prog: str
    description: str
    groups: Mapping[str, Sequence[Option]]

    @property
    def options(self) -> list[Option]:
        return [option for group in self.groups.values() for option in group]


def field_comments(record: type) -> dict[str, str]:
    """The comment lines right above each field of a dataclass, joined, as a command line puts it: none, not None.

    Nothing where there is no source, as for a class made in an interpreter.
    """
    found: dict[str, str] = {}
    comment: list[str] = []
    try:
        source = inspect.getsource(record)
    except (OSError, TypeError):
        return found
    for line in source.splitlines():
        if name := re.match(r"    (\w+): ", line):
            found[name[1]] = re.sub(r"\bNone\b", "none", " ".join(comment))
        text = re.match(r"    # (.*)", line)
        comment = [*comment, text[1]] if text else []
    return found


def parse(command: Command, arguments: Sequence[str]) -> dict[str, Any]:
    """The options that are given, by name. --help prints and exits with 0.

    Raises ValueError for whatever cannot be understood, one line that names the option and the remedy.
    """
    plain, named, more = _check(command, arguments)
    try:
        groups: Any = tyro.cli(_record(command), prog=command.prog, description=command.description, args=plain)
    except _RefusedError as refused:
        raise ValueError(str(refused)) from None
    given: dict[str, Any] = {}
    values = [value for group in vars(groups).values() for value in vars(group).values()]
    for option, value in zip(command.options, values, strict=True):
        if isinstance(value, _Given):
            given[option.name] = [value.value, *more.get(option.name, [])] if option.many else value.value
        elif option.kind is bool and option.name in named:
            given[option.name] = value
        elif option.required:
            raise ValueError(f"{option.flag} is missing: {option.help} See {command.prog} --help")
    return given


def parse_all(command: Command, arguments: Sequence[str]) -> dict[str, Any]:
    """The same, with the defaults of those that are not given."""
    return {option.name: option.default for option in command.options} | parse(command, arguments)


def _check(command: Command, arguments: Sequence[str]) -> tuple[list[str], set[str], dict[str, list[str]]]:
    """The arguments with every value joined to its flag, the names of the flags, and by name what came once more.

    Refuses here all that tyro would refuse with a box of many lines.
    """
    flags = {option.flag: option for option in command.options if not option.positional}
    flags |= {"--no-" + option.flag[2:]: option for option in command.options if option.kind is bool}
    places = [option for option in command.options if option.positional]
    last = next((option for option in places if option.many), None)
    plain: list[str] = []
    named: set[str] = set()
    more: defaultdict[str, list[str]] = defaultdict(list)
    left = list(arguments)
    while left:
        argument = left.pop(0)
        if argument in HELP_FLAGS:
            plain.append(argument)
        elif argument.startswith("-"):
            flag, equals, value = argument.partition("=")
            option = flags.get(flag.replace("_", "-"))
            if option is None:
                near = difflib.get_close_matches(flag, flags, 1)
                raise ValueError(f"unknown option {flag}; {_did_you_mean(near) or f'see {command.prog} --help'}")
            if option.kind is bool:
                if equals:
                    raise ValueError(f"{flag} takes no value; leave ={value} out")
                plain.append(flag)
            elif not equals and not (left and not left[0].startswith("--")):
                text = str in alternatives(option.kind) and left and left[0] not in flags
                remedy = f"for that text write {flag}={shlex.quote(left[0])}" if text else f"see {command.prog} --help"
                raise ValueError(f"{flag} needs a value: {describe(option.kind)}; {remedy}")
            else:
                value = _full(option, value if equals else left.pop(0), command)
                if option.many and option.name in named:
                    more[option.name].append(value)
                else:
                    plain.append(f"{flag}={value}")
            named.add(option.name)
        elif places:
            plain.append(_full(places.pop(0), argument, command))
        elif last is not None:
            more[last.name].append(_full(last, argument, command))
        else:
            raise ValueError(f"unexpected {argument}; options begin with --, see {command.prog} --help")
    return plain, named, more


def _full(option: Option, text: str, command: Command) -> str:
    """The text. Raises ValueError if it is empty where that means nothing."""
    if not text and not option.may_be_empty:
        raise ValueError(f"{option.flag} is empty; give {describe(option.kind)}, see {command.prog} --help")
    return text


def _did_you_mean(near: Sequence[str]) -> str:
    return f"did you mean {near[0]}?" if near else ""


class _Given(NamedTuple):
    """Tells a value that was typed from a default that equals it."""

    value: Any


def _record(command: Command) -> type:
    """The command as tyro wants it: a dataclass of a dataclass per group."""
    groups = []
    for title, options in command.groups.items():
        group = make_dataclass(title, [(o.name, _annotation(o), field(default=o.default)) for o in options])
        group.__doc__ = ""
        flat: Any = Annotated[group, tyro.conf.OmitArgPrefixes]
        groups.append((title, flat, field(default_factory=group)))
    return make_dataclass("command", groups)


def _annotation(option: Option) -> Any:
    if option.kind is bool:
        return Annotated[bool, tyro.conf.arg(help=option.help)]
    shown, text = _shown(option)
    spec: tyro.constructors.PrimitiveConstructorSpec[Any] = tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=shown,
        instance_from_str=lambda texts: _Given(_value(option, texts[0])),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [show(value)],
    )
    hint = "(required)" if option.required else f"(default: {show(option.default)})"
    kind: Any = Annotated[object, spec, tyro.conf.arg(help=text, help_behavior_hint=hint)]
    return Annotated[kind, tyro.conf.Positional] if option.positional else kind


def _shown(option: Option) -> tuple[str, str]:
    """The option's value and help as --help shows them: every value that has a name, beside the flag or in the help."""
    names = [alternative for alternative in alternatives(option.kind) if isinstance(alternative, str)]
    shown = metavar(option.kind)
    if not names or (len(shown) <= WIDEST and not option.positional):
        return (option.flag + ("…" if option.many else "") if option.positional else shown), option.help
    value = option.flag if option.positional else shown.replace("|".join(names), "NAME")
    return value, f"{option.help} One of {', '.join(names)}."


def _value(option: Option, text: str) -> Any:
    try:
        return parse_value(option.kind, text)
    except ValueError:
        near = difflib.get_close_matches(text, [str(a) for a in alternatives(option.kind)], 1)
        expected = f"{option.flag} {text}: expected {describe(option.kind)}"
        raise _RefusedError("; ".join(filter(None, [expected, _did_you_mean(near)]))) from None


def parse_value(kind: Any, text: str) -> Any:
    """`text` as a value of a record's type. Raises ValueError."""
    for alternative in sorted(alternatives(kind), key=lambda alternative: alternative is str):  # which any text is
        if alternative is type(None):
            if text.lower() == "none":
                return None
        elif isinstance(alternative, str):
            if text == alternative:
                return text
        elif get_origin(alternative) is tuple:
            kinds, texts = get_args(alternative), text.split(",")
            return tuple(parse_value(k, t) for k, t in zip(kinds, texts, strict=True))
        else:
            with contextlib.suppress(ValueError):
                value = alternative(text)
                if not isinstance(value, float) or math.isfinite(value):
                    return value
    raise ValueError(text)


def parse_names(flag: str, text: str, known: Collection[str] | None = None) -> list[str]:
    """The names in "A,B". Raises ValueError for one that is empty, comes twice or is not among the known ones."""
    names = text.split(",")
    for place, name in enumerate(names):
        if not name:
            raise ValueError(f"{flag} {shlex.quote(text)}: a name is missing beside a comma; write A,B")
        if name in names[:place]:
            raise ValueError(f"{flag} {text}: {name} is named twice; name it once")
        if known is not None and name not in known:
            near = _did_you_mean(difflib.get_close_matches(name, known, 1))
            raise ValueError(f"{flag} {name}: unknown; {near + ' ' if near else ''}there are {', '.join(known)}")
    return names


def metavar(kind: Any) -> str:
    """A record's type as --help shows it."""
    words: dict[Any, str] = {int: "INT", float: "FLOAT", str: "TEXT", type(None): "none"}
    parts = [
        ",".join(metavar(k) for k in get_args(a)) if get_origin(a) is tuple else words.get(a, str(a))
        for a in alternatives(kind)
    ]
    return "|".join(parts)


def show(value: Any) -> str:
    """A value as it would be typed."""
    if isinstance(value, tuple | list):
        return ",".join(show(item) for item in value)
    return "none" if value is None else str(value)

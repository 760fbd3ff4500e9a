"""Options of a command: a table that argparse turns into values, `--help` or one clear line."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple, NoReturn, get_args, get_origin

from ..option import Whole, allows, alternatives, bare, describe, did_you_mean, kinds_of
from ..train.config import DeviceName, DtypeName

HELP_FLAGS = ("-h", "--help")
WIDEST = 60
"""Maximum width of the values beside a flag; longer lists of names go into the help text, which wraps."""


class Option(NamedTuple):
    """`--name VALUE`, or a positional argument NAME, which is any text.

    kind: a type of a record's field; bool makes a pair, --name and --no-name. default: what --help shows.
    many: an option, or the last positional argument, that may be repeated; its value is the list of texts.
    may_be_empty: an empty text is valid; otherwise it is rejected, as it comes from an unset variable of the shell.
    key: the key of its value among the parsed ones; by default the name.
    """

    name: str
    kind: Any
    default: Any
    help: str
    positional: bool = False
    required: bool = False
    many: bool = False
    may_be_empty: bool = False
    key: str = ""

    @property
    def flag(self) -> str:
        """Return the option as it is typed."""
        return self.name.upper() if self.positional else "--" + self.name.replace("_", "-")


# Options of every command that reads a checkpoint, and of every command that computes.
STEP = Option("step", Whole | None, None, "The checkpoint to use; none is the last.")
COMPUTE = [
    Option("device", DeviceName, "auto", "Where to compute; auto is cuda if available, else cpu."),
    Option("dtype", DtypeName, "auto", "Dtype of matrix products; auto is bfloat16 where the hardware has it."),
]


class Command(NamedTuple):
    """prog: the command as typed, 'et train'. groups: the options under the titles that --help shows."""

    prog: str
    description: str
    groups: Mapping[str, Sequence[Option]]

    @property
    def options(self) -> list[Option]:
        return [option for group in self.groups.values() for option in group]


def parse(command: Command, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options given on the command line, by key. --help prints and exits with 0.

    Raises ValueError for anything invalid, in one line that names the option and the remedy.
    """
    parser = _Parser(command)
    given, left = parser.parse_known_intermixed_args([parser.hyphenated(argument) for argument in arguments])
    for text in sorted(left, key=lambda text: not text.startswith("-")):
        if not text.startswith("-"):
            parser.error(f"unexpected {text}")
        flag = text.partition("=")[0]
        remedy = did_you_mean(flag, parser.flags, f"see {command.prog} --help")
        raise ValueError(f"unknown option {flag}; {remedy}")
    return vars(given)


def parse_all(command: Command, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the same, with defaults for options that are not given."""
    return {option.key or option.name: option.default for option in command.options} | parse(command, arguments)


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors, and with defaults only in --help."""

    def __init__(self, command: Command) -> None:
        places = [
            f"{option.flag}{'…' if option.many else ''}" if option.required else f"[{option.flag}]"
            for option in command.options
            if option.positional
        ]
        super().__init__(
            command.prog,
            " ".join([command.prog, *places, "[OPTIONS]"]),
            command.description,
            formatter_class=_Help,
            allow_abbrev=False,
        )
        self.flags: list[str] = []
        for title, options in command.groups.items():
            group = self.add_argument_group(title)
            for option in options:
                self.flags += _add(group, option).option_strings

    def hyphenated(self, argument: str) -> str:
        """Return a flag that is typed with underscores with hyphens, and anything else, such as text, as it is."""
        typed, equals, value = argument.partition("=")
        flag = typed.replace("_", "-")
        return flag + equals + value if flag in self.flags else argument

    def error(self, message: str) -> NoReturn:
        told = message.removeprefix("argument ")
        if told.endswith(": expected one argument"):  # nothing follows, or what follows looks like a flag
            flag = told.partition(":")[0]
            told += f"; write {flag}=VALUE for a value that begins with -"
        raise ValueError(f"{told}; see {self.prog} --help")


class _Help(argparse.HelpFormatter):
    """Help that keeps paragraphs apart and does not break hyphenated names."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(_Help, self)._fill_text(part, width, indent) for part in text.split("\n\n"))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def _add(group: argparse._ArgumentGroup, option: Option) -> argparse.Action:
    names = [alternative for alternative in alternatives(option.kind) if isinstance(alternative, str)]
    metavar, text = option.flag if option.positional else _metavar(option.kind), option.help
    if names and (option.positional or len(metavar) > WIDEST):
        metavar, text = metavar.replace("|".join(names), "NAME"), f"{text} One of {', '.join(names)}."
    told = "(required)" if option.required else f"(default: {show(option.default)})"
    common: dict[str, Any] = {
        "dest": option.key or option.name,
        "default": argparse.SUPPRESS,  # to distinguish options that are given
        "help": f"{text} {told}".replace("%", "%%"),
    }
    if option.kind is bool:
        return group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **common)
    common |= {"metavar": metavar, "type": partial(_value, option)}
    if option.positional:
        return group.add_argument(nargs=_NARGS[option.required, option.many], **common)
    return group.add_argument(
        option.flag, action="append" if option.many else "store", required=option.required, **common
    )


_NARGS = {(True, True): "+", (True, False): None, (False, True): "*", (False, False): "?"}


def _value(option: Option, text: str) -> Any:
    """Parse the text as the option's value."""
    if not text and not option.may_be_empty:
        raise argparse.ArgumentTypeError(f"must not be empty; give {describe(option.kind)}")
    if option.positional:
        return text
    try:
        return parse_value(option.kind, text)
    except ValueError:
        near = did_you_mean(text, map(str, alternatives(option.kind)), otherwise="")
        huge = "numbers must be below 2**63" if _is_huge(text) else ""
        told = "; ".join(filter(None, [f"expected {describe(option.kind)}, not {text}", huge, near]))
        raise argparse.ArgumentTypeError(told) from None


def _is_huge(text: str) -> bool:
    """Return True if the text is a whole number beyond 64 bits, which no option takes."""
    digits = text.lstrip("+-")
    return digits.isdecimal() and (len(digits) > 19 or int(digits) > sys.maxsize)


def field_options(record: type, defaults: Mapping[str, Any], prefix: str = "") -> list[Option]:
    """Return an option for each field in `defaults` of a dataclass whose fields are made by option.py."""
    kinds, helps = kinds_of(record), {field.name: field.metadata.get("help", "") for field in fields(record)}
    return [Option(prefix + name, kinds[name], default, helps[name]) for name, default in defaults.items()]


def parse_value(kind: Any, text: str) -> Any:
    """Return `text` as a value of a record's type. Raises ValueError if it is none."""
    for alternative in sorted(alternatives(kind), key=lambda alternative: alternative is str):  # any text is a str
        if alternative is type(None):
            if text.lower() == "none":
                return None
        elif isinstance(alternative, str):
            if text == alternative:
                return text
        elif alternative is str:
            return text
        elif alternative is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
        elif get_origin(alternative) is tuple:
            kinds, texts = get_args(alternative), text.split(",")
            with contextlib.suppress(ValueError):
                return tuple(parse_value(k, t) for k, t in zip(kinds, texts, strict=True))
        else:
            with contextlib.suppress(ValueError):
                value = bare(alternative)[0](text)
                if allows(alternative, value):
                    return value
    raise ValueError(text)


def parse_names(flag: str, text: str, known: Collection[str] | None = None) -> list[str]:
    """Return the names in "A,B". Raises ValueError for one that is empty, unknown or named twice."""
    names = text.split(",")
    for place, name in enumerate(names):
        if not name:
            raise ValueError(f"{flag} {shlex.quote(text)}: a name is missing at a comma; write A,B")
        if name in names[:place]:
            raise ValueError(f"{flag} {text}: {name} is named twice; name it once")
        if known is not None and name not in known:
            raise ValueError(f"{flag} {name}: unknown; {did_you_mean(name, known)}")
    return names


def _metavar(kind: Any) -> str:
    """Return a field's type as --help shows it."""
    words: dict[Any, str] = {int: "INT", float: "FLOAT", str: "TEXT", bool: "true|false", type(None): "none"}
    parts = [
        ",".join(_metavar(k) for k in get_args(a)) if get_origin(a) is tuple else words.get(a, str(a))
        for a, _ in map(bare, alternatives(kind))
    ]
    return "|".join(parts)


def show(value: Any) -> str:
    """Return a value as it would be typed."""
    if isinstance(value, tuple | list):
        return ",".join(show(item) for item in value)
    return "none" if value is None else str(value)

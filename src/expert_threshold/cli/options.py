"""The options of a command, given as a table that argparse turns into values, `--help` or a one-line error."""

from __future__ import annotations

import argparse
import re
import shlex
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple, NoReturn, get_args, get_origin

import torch

from ..option import NonNegativeInt, alternatives, convert, did_you_mean, kinds_of
from ..train.config import DeviceName, DtypeName
from ..train.device import pick_device, pick_dtype

EVERYDAY = (
    "rule.name", "rule.num_experts", "rule.experts_per_token", "data.source", "model.layers", "model.d_model",
    "model.vocab_size", "model.context", "optim.matrix_lr", "train.steps", "train.batch_size", "train.accumulation",
    "train.seed", "train.device", "train.dtype", "train.compile", "train.threads", "train.log_every",
    "train.eval_every", "train.eval_tokens", "train.sample_every", "train.checkpoint_every",
)  # fmt: skip
"""Options of a run that also have a short flag, and that --help shows together with the rule's options."""
SHORT = {path: path.partition(".")[2] for path in EVERYDAY} | {"rule.name": "rule", "data.source": "data"}
WIDEST = 40
"""Maximum width of the values shown after a flag; longer lists of names go into the help text, which wraps."""


class Option(NamedTuple):
    """An option `--name VALUE`, or a positional argument NAME.

    name: the key of the value. A name with a dot is the path of a run's option, which --help shows under its section.
    kind: a type, as for the field of a record. A bool becomes a pair of flags, --name and --no-name. default: the
    default to show in --help. derived: whether that only describes how the command finds the value if it is omitted.
    many: whether the option, or the last positional argument, may be repeated, with a list of texts as its value.
    """

    name: str
    kind: Any
    default: Any
    help: str
    positional: bool = False
    required: bool = False
    many: bool = False
    derived: bool = False

    @property
    def flag(self) -> str:
        """The option as --help shows it."""
        return self.name.upper() if self.positional else flag_of(self.name)

    def read(self, text: str) -> Any:
        """Convert a text from the command line to a value."""
        try:
            return convert(self.kind, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None


def flag_of(name: str) -> str:
    """Return the flag of an option, which is the short flag if there is one."""
    return "--" + SHORT.get(name, name).replace("_", "-")


RATE = Option("rate", float | None, None, "Mean routed experts per token, 0 to all. Defaults to the trained number.")
# Options of every command that reads a checkpoint, and of every command that computes.
STEP = Option("step", NonNegativeInt | None, None, "Step of the checkpoint to use. Defaults to the last one.")
COMPUTE = [
    Option("device", DeviceName, "auto", "Device to compute on. auto selects cuda if it is available, else cpu."),
    Option("dtype", DtypeName, "auto", "Dtype of matrix products. auto selects bfloat16 if the hardware supports it."),
]


def parse(prog: str, description: str, options: Sequence[Option], arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options given on the command line, keyed by name. --help prints the help and exits with 0.

    Raises ValueError for invalid options, with a one-line message that names the option and the remedy.
    """
    parser = Parser(prog, description, options)
    typed: dict[str, str] = {}
    for flag in (argument.partition("=")[0] for argument in arguments):
        if flag in parser.flags and (first := typed.setdefault(parser.flags[flag], flag)) != flag:
            raise ValueError(f"{first} and {flag} set the same option; use only one of them")
    given, left = parser.parse_known_intermixed_args(arguments)
    for text in sorted(left, key=lambda text: not text.startswith("-")):
        if not text.startswith("-"):
            parser.error(f"unexpected {text}")
        flag = text.partition("=")[0]
        raise ValueError(f"unknown option {flag}; {did_you_mean(flag, parser.flags, f'see {prog} --help')}")
    return vars(given)


def parse_all(prog: str, description: str, options: Sequence[Option], arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options like `parse`, and include the defaults of options that are not given, or None if derived."""
    defaults = {option.name: None if option.derived else option.default for option in options}
    return defaults | parse(prog, description, options, arguments)


def take_own(given: dict[str, Any], own: Sequence[Option]) -> dict[str, Any]:
    """Move a command's `own` options out of those `given`, and return them like `parse_all`."""
    return {option.name: given.pop(option.name, None if option.derived else option.default) for option in own}


def picked_device(options: Mapping[str, Any]) -> tuple[torch.device, torch.dtype]:
    """Return the device and the dtype that the options in COMPUTE select."""
    device = pick_device(options["device"])
    return device, pick_dtype(options["dtype"], device)


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line. flags: the names of options, keyed by flag."""

    def __init__(self, prog: str, description: str, options: Sequence[Option]) -> None:
        places = [option.flag + "…" * option.many for option in options if option.positional]
        optional = [option.flag for option in options if option.positional and not option.required]
        usage = " ".join([prog, *(f"[{place}]" if place in optional else place for place in places), "[OPTIONS]"])
        help_format = partial(_Help, max_help_position=30)
        super().__init__(prog, usage, description, formatter_class=help_format, allow_abbrev=False)
        groups = {"": self._optionals}
        for option in options:
            section = option.name.rpartition(".")[0]
            if section not in groups:
                groups[section] = self.add_argument_group(section)
            _add(groups[section], option)
        self.flags = {flag: action.dest for action in self._actions for flag in action.option_strings}

    def error(self, message: str) -> NoReturn:
        text = re.sub(r"^argument ([^:/]+)[^:]*", r"\1", message)  # keeps only the short flag
        if text.endswith(": expected one argument"):  # nothing follows, or what follows looks like a flag
            text += f"; write {text.partition(':')[0]}=VALUE for a value that starts with -"
        raise ValueError(f"{text}; see {self.prog} --help")


class _Help(argparse.HelpFormatter):
    """Separates paragraphs in help texts, does not break hyphenated names, and shows only the short name of a flag."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        flag = action.option_strings[0]
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{flag[2:]}"
        return flag if action.nargs == 0 else f"{flag} {action.metavar}"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(_Help, self)._fill_text(part, width, indent) for part in text.split("\n\n"))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    shown, text = metavar(option.kind), option.help
    if len(shown) > WIDEST:
        names = [name for name, _ in alternatives(option.kind) if isinstance(name, str)]
        shown, text = shown.replace("|".join(names), "NAME"), f"{text} One of {', '.join(names)}."
    default = "required" if option.required else f"default: {show(option.default)}"
    how: dict[str, Any] = {"help": f"{text} ({default})".replace("%", "%%")}
    how |= {"default": argparse.SUPPRESS}  # so that only given options have values
    if option.positional:
        nargs = ("+" if option.many else None) if option.required else "?"
        group.add_argument(option.name, nargs=nargs, metavar=option.flag, type=option.read, **how)
        return
    flags = dict.fromkeys((option.flag, "--" + option.name.replace("_", "-")))
    if option.kind is bool:
        how |= {"action": argparse.BooleanOptionalAction}
    else:
        how |= {"action": "append" if option.many else "store", "metavar": shown, "type": option.read}
    group.add_argument(*flags, dest=option.name, required=option.required, **how)


def field_options(record: type, defaults: Mapping[str, Any], prefix: str = "") -> list[Option]:
    """Return an option for each field in `defaults` of a dataclass whose fields are defined with `option`."""
    kinds, helps = kinds_of(record), {field.name: field.metadata.get("help", "") for field in fields(record)}
    return [Option(prefix + name, kinds[name], default, helps[name]) for name, default in defaults.items()]


def parse_names(flag: str, text: str, known: Collection[str] | None = None) -> list[str]:
    """Return the names in "A,B" without duplicates. Raises ValueError for an empty or unknown name."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if not name:
            raise ValueError(f"{flag} {shlex.quote(text)} has an empty name before or after a comma; write A,B")
        if known is not None and name not in known:
            raise ValueError(f"{flag}: {name} is unknown; {did_you_mean(name, known)}")
    return names


def metavar(kind: Any) -> str:
    """Return a field's type as --help shows it."""
    words: dict[Any, str] = {int: "INT", float: "FLOAT", str: "TEXT", bool: "true|false", type(None): "none"}
    names = []
    for plain, _ in alternatives(kind):
        is_tuple = get_origin(plain) is tuple
        names.append(",".join(map(metavar, get_args(plain))) if is_tuple else words.get(plain, plain))
    return "|".join(filter(None, names))


def show(value: Any) -> str:
    """Return a value as a user would type it."""
    if isinstance(value, tuple | list):
        return ",".join(map(show, value))
    return "none" if value is None else str(value)

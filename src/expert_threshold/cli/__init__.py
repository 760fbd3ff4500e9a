"""The command `et`, which dispatches to its subcommands and reports errors in a single line."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence

from .. import __version__
from ..errors import is_out_of_memory
from ..glossary import as_text
from ..option import did_you_mean

COMMANDS = {
    "train": "train a language model into a run folder, or resume one",
    "plan": "estimate what a run costs: parameters, FLOPs, memory, time and money",
    "generate": "continue a text with a trained model",
    "serve": "serve a trained model over HTTP, with OpenAI's completions API",
    "data": "download text and questions, train a tokenizer, or tokenize text in advance",
    "evaluate": "evaluate trained models: loss, bits per byte, and the tasks of CORE",
    "compare": "train several methods with the same budget and compare their losses",
    "sweep": "search each method's learning rates and other options for the lowest loss",
    "recipes": "list the paper's runs with their reported results",
    "analyze": "draw every figure of the paper from run folders",
    "audit": "audit the experts and the causality of a run or of any transformers model",
    "calibrate": "measure the cutoffs of a trained model, for any rate, without training",
    "upcycle": "initialize a Mixture-of-Experts run from a dense one",
    "retrofit": "convert a top-k mixture to variable fanout, and compare the two",
    "export": "export a trained model to a folder for Hugging Face transformers",
    "import": "turn an exported folder, fine-tuned or not, into a run folder",
}
"""What each command does. Its module is imported when it is called, and has run(arguments)."""

RUN_COMMANDS = ("train", "plan", "compare", "sweep")
"""The commands that accept a run's options; their errors name options by path."""

# Remedies for each OSError.
FULL = "free some space and run it again; a training run continues with --resume, and saved files are intact"
REMEDIES = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EACCES: "change its permissions, or use another path",
    errno.EPERM: "change its permissions, or use another path",
    errno.EROFS: "use a path on a writable disk",
    errno.EEXIST: "use another path",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "use the path of a file",
}

USAGE_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default sys.argv, and return its exit code.

    ValueErrors, OSErrors and out-of-memory errors can be fixed by the user, so they print one line to stderr, and the
    exit code is 2. With ET_DEBUG=1, they show a traceback, as all other exceptions do.
    """
    _prepare_output()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    command = next((name for name in arguments[:1] if name in COMMANDS), None)
    prog = "et" if command is None else f"et {command}"
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, OSError, MemoryError, RuntimeError, TypeError) as error:
        if not is_users(error):
            raise
        text = one_line(error)
        if command in RUN_COMMANDS:
            text = importlib.import_module(".run_options", __name__).with_paths(text)
        print(f"{prog}: {text}", file=sys.stderr)
        return USAGE_ERROR


def _prepare_output() -> None:
    """Make printing safe wherever the output goes."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell, as by >&-
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 shows escapes
    if not os.environ.get("COLUMNS", "1").strip("0"):  # rich would print lines of width 0
        del os.environ["COLUMNS"]


def is_users(error: BaseException) -> bool:
    """Return True if the user can fix the error, so that one line replaces the traceback."""
    ours = isinstance(error, ValueError | OSError) or (isinstance(error, Exception) and is_out_of_memory(error))
    return ours and os.environ.get("ET_DEBUG") != "1"


def _run(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--version"]:
        print(f"expert-threshold {__version__}")
        return 0
    for argument in arguments:
        if argument != argument.encode(errors="replace").decode():
            raise ValueError(f"{argument!a} is not UTF-8; rename the file, or encode the text as UTF-8")
    try:
        about = "Mixture-of-experts language models with Expert Threshold routing."
        name, rest = choose("et", "command", about, COMMANDS, arguments, f"\n\nglossary:\n{as_text()}")
        importlib.import_module(".import_" if name == "import" else f".{name}", __name__).run(rest)
    except SystemExit as stop:  # --help was shown, or rich met a closed pipe
        if isinstance(stop.__context__, BrokenPipeError):
            raise stop.__context__ from None
        return int(stop.code or 0)
    return 0


def choose(
    prog: str, kind: str, about: str, summaries: Mapping[str, str], arguments: Sequence[str], more: str = ""
) -> tuple[str, Sequence[str]]:
    """Return the name of the command that comes first, and its arguments. --help prints all commands and exits with 0.

    kind: what the names are called. more: a text to print below. Raises ValueError if the name is missing or unknown.
    """
    if not arguments:
        raise ValueError(f"no {kind} was given; use one of {', '.join(summaries)}, or see {prog} --help")
    name, *rest = arguments
    if name in ("-h", "--help"):
        width = max(map(len, summaries))
        print(f"usage: {prog} {kind.upper()} [OPTIONS]\n\n{about}\n")
        for each, summary in summaries.items():
            print(f"  {prog} {each:{width}}  {summary}")
        print(f"\n{prog} {kind.upper()} --help shows every option with its default.{more}")
        raise SystemExit(0)
    if name not in summaries:
        raise ValueError(f"unknown {kind} {name}; {did_you_mean(name, summaries)}")
    return name, rest


def one_line(error: BaseException) -> str:
    if not isinstance(error, ValueError | OSError):
        return "out of memory; use a smaller model, or a machine or a device with more memory"
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror}; {REMEDIES.get(error.errno or 0, 'try again, or use another path')}"
    return " ".join(str(error).split()) or type(error).__name__

"""Finds the commands that run and extend this installation, for messages that show what to type."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def et() -> str:
    """Return `et` if a shell finds this installation by that name, or else the path that was used to call it."""
    called, found = _script(), shutil.which("et")
    if called is None or (found is not None and os.path.samefile(found, called)):
        return "et"
    return shlex.quote(str(called))


def program() -> list[str]:
    """Return the arguments that make Python run the same `et` in another process."""
    called = _script()
    return ["-m", __package__] if called is None else [str(called)]


def _script() -> Path | None:
    """Return the `et` script that this process runs. Return None under `python -m` and in any other program."""
    called = Path(sys.argv[0])
    return called if called.stem == "et" and called.is_file() else None


def install(extra: str) -> str:
    """Return the command that adds one of the package's optional extras to this installation.

    pip leaves an installed package as it is, even if it is editable, and installs only what the extra needs.
    """
    pip = "pip" if et() == "et" else f"{shlex.quote(str(Path(sys.argv[0]).with_name('python')))} -m pip"
    return f"{pip} install 'expert-threshold[{extra}]'"

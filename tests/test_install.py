"""Commands suggested to the user suit the installation."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

from expert_threshold.install import et, install, program

ROOT = Path(__file__).parents[1]


def call(program: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """The test as the program at that path, with that PATH."""
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(program), "train"])
    monkeypatch.setenv("PATH", path)


def test_a_program_that_the_shell_does_not_find_is_named_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make demo` ended with `et generate …`, which no shell found: it lies in .venv/bin."""
    monkeypatch.chdir(tmp_path)
    script = Path(".venv/bin/et")
    call(script, monkeypatch, os.defpath)
    assert (et(), program()) == (".venv/bin/et", [".venv/bin/et"])  # so that ranks name it as their parent would
    assert install("serve") == ".venv/bin/python -m pip install 'expert-threshold[serve]'"
    call(script, monkeypatch, str(script.parent.absolute()))
    assert et() == "et"
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert (et(), program()) == ("et", ["-m", "expert_threshold"])
    assert install("viz") == "pip install 'expert-threshold[viz]'"


def test_errors_tell_extras_that_there_are() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    named = {name for source in sources for name in re.findall(r"\binstall\(['\"](\w+)['\"]\)", source)}
    assert named == {"hub", "viz", "serve", "eval", "sweep", "track", "triton"} <= extras.keys()
    assert not [source for source in sources if "pip install 'expert-threshold" in source]

"""Commands suggested to the user suit the installation."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from expert_threshold.install import et, install, program

ROOT = Path(__file__).parents[1]


class Installed:
    def __init__(self, record: object) -> None:
        self._record = record

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._record is None else json.dumps(self._record)


def installed(monkeypatch: pytest.MonkeyPatch, record: object) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(record))


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
    call(script, monkeypatch, str(script.parent.absolute()))
    assert et() == "et"
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert (et(), program()) == ("et", ["-m", "expert_threshold"])


def test_in_a_clone_extras_are_installed_from_the_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install 'expert-threshold[serve]'` looked for a published package."""
    clone = tmp_path / "a clone"
    clone.mkdir()
    installed(monkeypatch, {"url": clone.as_uri(), "dir_info": {"editable": True}})
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert install("serve") == f"pip install -e '{clone}[serve]'"
    monkeypatch.chdir(clone)
    assert install("serve") == "pip install -e '.[serve]'"
    call(Path(".venv/bin/et"), monkeypatch, os.defpath)
    assert install("serve") == ".venv/bin/python -m pip install -e '.[serve]'"


@pytest.mark.parametrize("record", [None, {"url": "https://example.org/it.whl", "archive_info": {}}])
def test_elsewhere_extras_are_installed_by_name(record: object, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, record)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert install("viz") == "pip install 'expert-threshold[viz]'"


def test_errors_tell_extras_that_there_are() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    named = {name for source in sources for name in re.findall(r"\binstall\(['\"](\w+)['\"]\)", source)}
    assert named == {"hub", "viz", "serve", "eval", "sweep", "track", "triton"} <= extras.keys()
    assert not [source for source in sources if "pip install 'expert-threshold" in source]

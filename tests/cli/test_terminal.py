"""Commands can print wherever their output goes, and report in one line what is missing."""

from __future__ import annotations

import io
import pwd
import sys
import tempfile
from pathlib import Path

import pytest

from cases import et, said
from commands import Refused
from expert_threshold.data import public
from expert_threshold.data.public import VARIABLE


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_command_works_with_a_closed_output(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python sets closed streams to None, as under `et recipes >&-`."""
    monkeypatch.setattr(sys, closed, None)
    assert et("recipes") == 0
    assert et("train", "--no-such-option") == 2
    getattr(sys, closed).close()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_utf_8_gets_escapes(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding))
    assert et("recipes") == 0
    assert "\\u2013" in shown.getvalue().decode(encoding)


def test_a_terminal_of_no_columns_is_one_of_unknown_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert "expert_threshold" in said("recipes")


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container user without an entry in the user database."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for variable in ("HOME", "XDG_CACHE_HOME", VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize("line", ["data core", "data tokenizer", "train --data fineweb-edu"])
def test_without_a_home_folder_another_cache_is_asked_for(line: str, homeless: None, refused: Refused) -> None:
    assert public.core_bundle() is None  # which is asked for by every evaluation
    refused(line.split(), f"set {VARIABLE} to another cache folder")


def test_without_a_temporary_folder_one_is_asked_for(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    monkeypatch.setattr("expert_threshold.cli.recipes.run", lambda _: tempfile.gettempdir())
    refused(["recipes"], "TMPDIR")

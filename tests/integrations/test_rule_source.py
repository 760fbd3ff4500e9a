"""A rule whose file would not load beside exported weights is refused before anything is written."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from expert_threshold.integrations.rule_source import rule_files


def rule_of(imports: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str = "mine") -> Any:
    """The rule of a package's module whose first lines are `imports`."""
    for name, text in {"__init__": "", "beside": "X = 1\n"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    text = f"{imports}\nfrom expert_threshold.routing import TopP\n\n\nclass Mine(TopP): pass\n"
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path.parent)
    return import_module(f"{tmp_path.name}.{module}").Mine(4, 1)


@pytest.mark.parametrize(
    ("imports", "words"),
    [
        ("from .beside import X", "a single file"),
        ("from . import beside", "a single file"),
        ("from expert_threshold import follow", "'follow': an exported rule may import only"),
        ("from expert_threshold.model import GPT", "an exported rule may import only"),
    ],
)
def test_a_rule_of_two_files_is_refused(
    imports: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=words):
        rule_files(rule_of(imports, tmp_path, monkeypatch))


def test_the_rules_themselves_may_come_from_the_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = rule_files(rule_of("from expert_threshold import TokenChoice", tmp_path, monkeypatch))
    assert "from .routing import TokenChoice" in files["rule_mine.py"]


def test_a_foreign_file_named_as_the_package_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = rule_files(rule_of("from expert_threshold import TokenChoice", tmp_path, monkeypatch, "expert_threshold"))
    assert "class Mine" in files["rule_expert_threshold.py"]
    assert "class ExpertThreshold" in files["routing_expert_threshold.py"]
    assert "from .routing_expert_threshold import" in files["routing.py"]

"""A rule of another distribution, `examples/new_rule`: installed, it is taken like one of ours."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from processes import run_python

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "new_rule"
SERVING = ["serve"] if find_spec("uvicorn") and find_spec("starlette") else []
FIGURES = ["analyze"] if find_spec("matplotlib") else []
BRIDGE = ["transformers"] if find_spec("transformers") else []
COMMANDS = [
    "plan", "help_and_nonsense", "train", "resume", "begin_from", "compare", "sweep", "evaluate", "calibrate",
    "generate", *SERVING, "export_and_import", *BRIDGE, *FIGURES,
]  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the example is installed into."""
    pytest.importorskip("hatchling", reason="needs hatchling: pip install -e '.[dev]'")
    place = tmp_path_factory.mktemp("site")
    source = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "new_rule")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--target", str(place)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, timeout=300)
    return place


def run(site: Path, *arguments: str, cwd: Path) -> str:
    """Run Python with the example and this package importable."""
    return run_python(*arguments, cwd=cwd, path=[site])


@pytest.mark.timeout(1200)
def test_every_command_takes_a_rule_of_another_distribution(site: Path, tmp_path: Path) -> None:
    program = ROOT / "tests" / "helpers" / "every_command.py"
    told = run(site, str(program), str(tmp_path), *COMMANDS, cwd=tmp_path)
    assert [line for line in told.splitlines() if line in COMMANDS] == COMMANDS


@pytest.mark.timeout(600)
def test_the_example_s_own_tests_pass(site: Path, tmp_path: Path) -> None:
    tests = shutil.copy(EXAMPLE / "test_min_p_rule.py", tmp_path)
    run(site, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), cwd=tmp_path)


def test_not_a_line_of_the_package_knows_the_rule() -> None:
    for path in (ROOT / "src").rglob("*"):
        if path.suffix in (".py", ".js", ".html", ".cpp", ".h"):
            text = path.read_text(encoding="utf-8").lower()
            for sampling in ('("top_p", "min_p")', '"min_p": zero'):  # parameters of sampling have the same name
                text = text.replace(sampling, "")
            assert not re.search("min[-_]?p\\b", text), path

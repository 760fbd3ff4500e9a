"""`et serve`: what it serves to whom, where it listens, and what it refuses."""

from __future__ import annotations

import contextlib
import inspect
import re
import socket
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("starlette", reason="the server's packages are not installed: pip install -e '.[serve]'")
pytest.importorskip("uvicorn", reason="the server's packages are not installed: pip install -e '.[serve]'")

from cases import RULES, et, small_model, write_run
from commands import Refused
from expert_threshold.cli import generate as command
from expert_threshold.generate.engine import generate
from expert_threshold.install import install
from expert_threshold.serve.explorer import STATIC
from served import process


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A run that can be served."""
    return write_run(tmp_path / "run", small_model()).path


def app_of(*arguments: object) -> Any:
    with mock.patch("expert_threshold.serve.connections.run_server") as run:
        assert et("serve", *arguments, "--port", 0) == 0
    return run.call_args.args[0]


def test_a_run_is_served_until_the_server_is_interrupted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install openai")
    monkeypatch.setenv("ET_API_KEY", "key")
    with process(path) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["run"]
        told = client.completions.create(model="run", prompt="the", max_tokens=3, temperature=0)  # draws may end
        assert told.usage.completion_tokens == 3


def test_a_port_in_use_is_refused_before_anything_starts(path: Path, refused: Refused) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        refused(["serve", path, "--port", port], f"--port {port} is already in use on 127.0.0.1")


def test_a_host_that_is_allowed_already_is_named_once(path: Path) -> None:
    seen: dict[str, Any] = {}
    with mock.patch("expert_threshold.serve.server.create_app", lambda *_, **options: seen.update(options)):
        app_of(path, "--public-host", "Lab.example")
    assert list(seen["hosts"]) == ["127.0.0.1", "localhost", "::1", "lab.example"]


def test_missing_packages_are_reported_with_the_command_to_install_them(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "expert_threshold.serve.connections", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    refused(["serve", "run"], "needs uvicorn", install("serve"))


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("", True),
        ("--host 0.0.0.0", False),
        ("--host 0.0.0.0 --explorer", True),
        ("--public-host lab.example", False),
        ("--public-host lab.example --explorer", True),
    ],
)
def test_the_explorer_is_there_for_this_machine_alone_unless_asked_for(options: str, shown: bool, path: Path) -> None:
    paths = {route.path for route in app_of(path, *options.split()).routes}
    explorer = {"/", "/static/{file}", "/explorer/runs", "/explorer/read"}
    assert paths & explorer == (explorer if shown else set())


def test_runs_are_compared_under_names_of_their_own(path: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other" / "run", small_model(RULES["dense"])).path
    with mock.patch("expert_threshold.serve.explorer.routes", return_value=[]) as made:
        app_of(path, "--compare", other)
        assert [run.name for run in made.call_args.args[0]] == ["run", str(other)]
        app_of(path, "--compare", path, "--compare", path)
        assert [run.name for run in made.call_args.args[0]] == ["run", str(path), f"{path} 2"]


def test_samples_have_one_temperature_unless_told() -> None:
    """At 0.8, the former default, small models repeat themselves five times as often as real text does."""
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    field = re.search(r'id="temperature"[^>]* value="([^"]*)"', page)
    option = next(option.default for option in command.OPTIONS if option.name == "temperature")
    assert float(field[1]) == option == inspect.signature(generate).parameters["temperature"].default == 1

"""A server that runs in a thread of the test process, on a free port."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import uvicorn
from starlette.applications import Starlette

from cases import small_model, small_tokenizer
from expert_threshold.generate.engine import ActiveRequest, Engine
from expert_threshold.model import GPT
from expert_threshold.serve.connections import bind, configure
from expert_threshold.serve.explorer import Explored, routes
from expert_threshold.serve.server import Service, create_app
from expert_threshold.serve.worker import Limits, Worker

PATIENCE = 60
"""Seconds after which a waiting test fails. Nothing here takes longer than one."""


class Held(Engine):
    """An engine that makes only `free` steps until `open` is set."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.open = threading.Event()
        self.free = 0

    def step(self) -> list[ActiveRequest]:
        if self.open.is_set() or self.free:
            self.free -= bool(self.free)
            return super().step()
        time.sleep(0.001)  # the worker runs commands in the meantime
        return []


class Served(uvicorn.Server):
    def __init__(self, app: Starlette) -> None:
        with mock.patch.object(uvicorn.Config, "configure_logging"):  # it would configure the whole process
            super().__init__(configure(app, grace=1))
        self.service: Service = app.state.service

    @property
    def url(self) -> str:
        port = self.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    @property
    def worker(self) -> Worker:
        return self.service.worker

    @property
    def engine(self) -> Held:
        return cast(Held, self.worker.engine)


@contextlib.contextmanager
def running(app: Starlette, sockets: Any) -> Iterator[Served]:
    """Run a server in a thread until the context ends."""
    server = Served(app)
    thread = threading.Thread(target=server.run, args=(sockets,))
    thread.start()
    try:
        until(lambda: server.started)
        yield server
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


@contextlib.contextmanager
def served(
    model: GPT | None = None, *, name: str = "small", limits: Limits | None = None, held: bool = False,
    engine: Any = None, report: Path | None = None, explore: Sequence[Explored] | None = None, **options: Any,
) -> Iterator[Served]:  # fmt: skip
    """Serve a model. engine, options: options of the engine and the app. explore: other runs of an explorer, if any."""
    kind = Held if held else Engine
    worker = Worker(kind(model or small_model(), small_tokenizer(), **(engine or {})), (limits or Limits()).queue)
    runs = [Explored(name, worker, report), *(explore or ())]
    pages = [] if explore is None else routes(runs)
    app = create_app([run.worker for run in runs], name, limits=limits, routes=pages, **options)
    with running(app, bind("127.0.0.1", 0)) as server:
        yield server


class Process:
    """`et serve` of a run, in a process of its own."""

    def __init__(self, command: subprocess.Popen[bytes], log: Path) -> None:
        self.command, self.log = command, log
        until(lambda: "running on" in log.read_text() or command.poll() is not None)
        found = re.search(r"http://(127\.0\.0\.1:\d+)", log.read_text())
        assert found is not None, log.read_text()
        self.url = found[0]

    def metrics(self) -> dict[str, float]:
        lines = re.findall(r"^(et_\S+) (\S+)$", ask(self, "/metrics").text, re.M)
        return {name: float(number) for name, number in lines}

    def statuses(self) -> Counter[int]:
        counts: Counter[int] = Counter()
        for name, number in self.metrics().items():
            if status := re.search(r'status="(\d+)"', name):
                counts[int(status[1])] += round(number)
        return counts

    def megabytes(self) -> float:
        """Resident; without what a page of text or a map of a file takes."""
        text = Path(f"/proc/{self.command.pid}/status").read_text()
        found = re.search(r"RssAnon:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) / 1024


@contextlib.contextmanager
def process(run: Path, *options: str) -> Iterator[Process]:
    """Serve a run in its own process, which must end in peace when it is interrupted."""
    command = [sys.executable, "-m", "expert_threshold", "serve", str(run), "--port", "0", "--threads", "1", *options]
    with (run.parent / "log").open("w+") as log, subprocess.Popen(command, stderr=log) as started:
        try:
            yield Process(started, Path(log.name))
            started.send_signal(signal.SIGINT)
            assert started.wait(PATIENCE) == 0
            assert "Traceback" not in Path(log.name).read_text()
        finally:
            started.kill()


class Reply(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    text: str

    @property
    def error(self) -> dict[str, Any]:
        error = json.loads(self.text)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in self.text
        return dict(error)


def connect(server: Any) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE)


def ask(server: Any, path: str, body: Any = None, method: str | None = None, **headers: Any) -> Reply:
    """Send GET, or POST if there is a body, which is JSON unless it is bytes. headers: names with _ instead of -."""
    connection, headers = connect(server), {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        headers = {"Content-Type": "application/json"} | headers
        body = body if isinstance(body, bytes) else json.dumps(body)
    connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
    response = connection.getresponse()
    reply = Reply(response.status, response.headers, response.read().decode())
    connection.close()
    return reply


def hung(served: Served) -> int:
    """Return the number of connections that count as unfinished."""
    connections: list[Any] = list(served.server_state.connections)
    return sum(connection.hanging_since is not None for connection in connections)


def until(true: Callable[[], bool]) -> None:
    """Wait until another thread makes a condition true."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)

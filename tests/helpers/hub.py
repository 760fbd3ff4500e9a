"""A stand-in for the Hugging Face hub on this machine, which does much wrong if asked."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import importlib
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest


class Server(http.server.ThreadingHTTPServer):
    """Serves `files` in every repository, and each at /NAME, but first does what `faults` says, one fault a request.

    Commits add to `files`.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.sent = Counter[str]()  # how often each file was asked for

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            if value:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if "/tree/" in path:
            found = [
                {"type": "file", "path": name, "oid": "0" * 40, "size": len(content), "lfs": self.large(content)}
                for name, content in self.server.files.items()
            ]
            return self.answer(200, json.dumps(found).encode())
        if "/revision/" in path:
            if not self.server.files:
                return self.answer(404, X_Error_Code="RepoNotFound")
            found = [{"rfilename": name} for name in self.server.files]
            return self.answer(200, json.dumps({"id": "a/b", "sha": "0" * 40, "siblings": found}).encode())
        name = path.rpartition("/resolve/")[2].partition("/")[2] if "/resolve/" in path else path[1:]
        content = self.server.files.get(name)
        if content is None:
            return self.answer(404, X_Error_Code="EntryNotFound")
        facts = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X_Repo_Commit": "0" * 40}
        if self.command == "HEAD":
            return self.answer(200, content, **facts)
        self.server.sent[name] += 1
        faults = self.server.faults[name]
        fault = faults.pop(0) if faults else ""
        if fault.isdigit():
            return self.answer(int(fault))
        body, facts["Content_Length"] = content, str(len(content))
        if fault == "short":
            body, self.close_connection = body[: len(body) // 2], True
        if fault == "no length":
            facts["Content_Length"], self.close_connection = "", True
        if fault == "garbled":
            body = bytes(len(body))
        return self.answer(200, body, **facts)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer: dict[str, Any] = {"commitUrl": self.server.url(f"a/b/commit/{0:040}"), "commitOid": "0" * 40}
        if "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]
            answer = {"files": modes}
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            new = self.server.created[-1]
            answer = {"url": self.server.url(f"{new['organization']}/{new['name']}")}
        self.answer(200, json.dumps(answer).encode())

    def large(self, content: bytes) -> dict[str, Any] | None:
        """The record that the hub returns for a large file."""
        if len(content) < 100:
            return None
        return {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 100}


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the server at this address for the hub, as with HF_ENDPOINT set."""
    hub_constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(hub_constants, "ENDPOINT", url)
    monkeypatch.setattr(hub_constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@contextlib.contextmanager
def hub_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Run the stand-in in a thread, as the hub of this process."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        point_at(server.url("")[:-1], monkeypatch)
        yield server
        server.shutdown()
        thread.join()

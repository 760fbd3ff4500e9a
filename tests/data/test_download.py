"""The downloader against a server that does everything wrong, and the two public data sets that it is for."""

from __future__ import annotations

import email.utils
import hashlib
import http.server
import io
import random
import threading
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from expert_threshold.data import download as module
from expert_threshold.data import public
from expert_threshold.data.cache import VARIABLE, cache_folder, require_writable
from expert_threshold.data.download import Remote, download

CONTENT = random.Random(0).randbytes(300_000)
HASH = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`, but first does what `faults` says for each path, one fault per request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.headers: dict[str, dict[str, str]] = defaultdict(dict)
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.always: dict[str, str] = {}
        self.ranges: dict[str, list[str | None]] = defaultdict(list)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"

    def remote(self, name: str, folder: Path) -> Remote:
        return Remote(self.url(name), folder / name)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def version_string(self) -> str:
        return self.server.headers[self.path.removeprefix("/")].get("Server", "test")

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        name = self.path.removeprefix("/")
        self.server.ranges[name].append(self.headers["Range"])
        faults = self.server.faults[name]
        fault = faults.pop(0) if faults else self.server.always.get(name, "")
        kind, _, value = fault.partition(" ")
        if kind == "drop":
            self.close_connection = True
            return
        if kind.isdigit():
            self.send_response(int(kind))
            if value:
                self.send_header("Retry-After", value)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if kind == "redirect":
            self.send_response(302)
            self.send_header("Location", value)
            self.send_header("X-Linked-ETag", f'"{HASH}"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if name not in self.server.files:
            self.send_error(404)
            return
        self.send_file(name, kind)

    def send_file(self, name: str, kind: str) -> None:
        content = self.server.files[name]
        etag = f'"{hash(content)}"'
        start = 0
        asked = self.headers["Range"]
        same = kind == "careless" or self.headers.get("If-Range", etag) == etag
        if asked and kind != "whole" and same:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
        if start >= len(content):
            self.send_response(416)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            first = start + 1 if kind == "shifted" else start
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", self.server.headers[name].get("ETag", etag))
        self.end_headers()
        body = content[start:]
        if kind == "short":
            body = body[: max(len(body) // 2, 1)]
            self.close_connection = True
        if kind == "garbled":
            body = bytes(len(body))
        self.wfile.write(body)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(module, "FIRST_WAIT", 0.001)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_several_files_arrive_at_once_and_nothing_else_is_left(server: Server, tmp_path: Path) -> None:
    names = [f"{number}.bin" for number in range(12)]
    server.files = {name: CONTENT[: 1000 * number + 1] for number, name in enumerate(names)}
    seen: list[tuple[int, int]] = []
    remotes = [server.remote(name, tmp_path) for name in names]
    download(remotes, connections=4, progress=lambda done, total: seen.append((done, total)))
    assert {name: (tmp_path / name).read_bytes() for name in names} == server.files
    assert left_over(tmp_path) == sorted(names)
    assert seen[-1][0] == seen[-1][1] == sum(map(len, server.files.values()))


@pytest.mark.parametrize(
    "faults",
    [
        ["drop"],
        ["short"],
        ["short", "short", "drop", "short"],
        ["503"],
        ["429 0", "500", "502", "504"],
        ["short", "whole"],
        ["short", "shifted"],
        ["short"] * 9,
    ],
    ids=" ".join,
)
def test_a_server_that_fails_for_a_while_is_asked_again(faults: list[str], server: Server, tmp_path: Path) -> None:
    server.files["a"] = CONTENT
    server.faults["a"] = faults
    download([server.remote("a", tmp_path)])
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert left_over(tmp_path) == ["a"]


def test_a_retry_requests_only_the_missing_bytes(server: Server, tmp_path: Path) -> None:
    server.files["a"] = CONTENT
    server.faults["a"] = ["short", "short"]
    download([server.remote("a", tmp_path)])
    half, quarter = len(CONTENT) // 2, len(CONTENT) // 4
    assert server.ranges["a"] == [None, f"bytes={half}-", f"bytes={half + quarter}-"]


def test_the_next_call_resumes_where_the_last_one_failed(server: Server, tmp_path: Path) -> None:
    server.files["a"] = CONTENT
    server.faults["a"] = ["short", *["503"] * module.ATTEMPTS]
    with pytest.raises(ValueError, match=r"/a: HTTP 503 .*, 6 times in a row; try again later, the partial"):
        download([server.remote("a", tmp_path)])
    assert left_over(tmp_path) == [".note-a", ".part-a"]
    download([server.remote("a", tmp_path)])
    assert server.ranges["a"][-1] == f"bytes={len(CONTENT) // 2}-"
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_a_part_of_a_file_that_has_changed_since_is_thrown_away(server: Server, tmp_path: Path) -> None:
    for content in (CONTENT[::-1], CONTENT[:10]):
        server.files["a"] = CONTENT
        server.faults["a"] = ["short", "404"]
        with pytest.raises(ValueError, match="404"):
            download([server.remote("a", tmp_path)])
        server.files["a"] = content
        download([server.remote("a", tmp_path)])
        assert (tmp_path / "a").read_bytes() == content
        (tmp_path / "a").unlink()


def test_a_server_that_sends_the_rest_of_another_file_is_not_believed(server: Server, tmp_path: Path) -> None:
    server.files["a"] = CONTENT
    server.faults["a"] = ["short", "404"]
    with pytest.raises(ValueError, match="404"):
        download([server.remote("a", tmp_path)])
    server.files["a"] = CONTENT[::-1]
    server.faults["a"] = ["careless"]
    download([server.remote("a", tmp_path)])
    assert (tmp_path / "a").read_bytes() == CONTENT[::-1]


def test_a_part_without_its_note_is_thrown_away(server: Server, tmp_path: Path) -> None:
    server.files["a"] = CONTENT
    (tmp_path / ".part-a").write_bytes(b"of something else")
    (tmp_path / ".note-a").write_bytes(b"{")
    download([server.remote("a", tmp_path)])
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_a_download_killed_before_its_rename_is_not_requested_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["a"] = CONTENT

    def die(*_: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", die)
        with pytest.raises(RuntimeError, match="killed"):
            download([server.remote("a", tmp_path)])
    download([server.remote("a", tmp_path)])
    assert len(server.ranges["a"]) == 1
    assert (tmp_path / "a").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "headers",
    [
        {"ETag": f'"{HASH}"'},
        {"ETag": f'"{hashlib.md5(CONTENT).hexdigest()}"', "Server": "AmazonS3"},
    ],
    ids=["sha256", "md5"],
)
def test_contents_are_checked_against_the_hash_that_the_server_states(
    headers: dict[str, str], server: Server, tmp_path: Path
) -> None:
    server.files["a"], server.headers["a"] = CONTENT, headers
    server.faults["a"] = ["garbled", "garbled"]
    download([server.remote("a", tmp_path)])
    assert (tmp_path / "a").read_bytes() == CONTENT
    server.always["b"] = "garbled"
    server.files["b"], server.headers["b"] = CONTENT, headers
    with pytest.raises(ValueError, match=r"/b: the download has .* the server states .*, 6 times in a row"):
        download([server.remote("b", tmp_path)])
    assert not (tmp_path / "b").exists()


def test_a_hash_that_a_redirect_tells_is_checked(server: Server, tmp_path: Path) -> None:
    """The Hugging Face hub sends to another server, which knows nothing of the SHA-256."""
    server.files["far"] = CONTENT
    server.always["near"] = "redirect " + server.url("far")
    server.faults["far"] = ["garbled", "short"]
    download([server.remote("near", tmp_path)])
    assert (tmp_path / "near").read_bytes() == CONTENT
    assert server.ranges["far"] == [None, None, f"bytes={len(CONTENT) // 2}-"]


def test_a_file_that_is_not_there_is_refused_and_those_before_it_stay(server: Server, tmp_path: Path) -> None:
    server.files["a"] = CONTENT
    remotes = [server.remote(name, tmp_path) for name in ("a", "missing", "b")]
    with pytest.raises(ValueError, match=r"/missing: HTTP 404 Not Found; check the address$"):
        download(remotes, connections=1)
    assert left_over(tmp_path) == ["a"]
    assert "b" not in server.ranges


def test_a_file_that_is_there_is_left_alone(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    download([server.remote("a", tmp_path)])
    assert (tmp_path / "a").read_bytes() == b"mine"
    assert not server.ranges


def test_a_server_is_left_alone_for_as_long_as_it_asks(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["a"] = CONTENT
    waits: list[float] = []
    now = time.time()
    monkeypatch.setattr(module.time, "time", lambda: now)
    server.faults["a"] = ["429 7", "503 " + email.utils.formatdate(now + 60, usegmt=True)]
    job = module._Job([server.remote("a", tmp_path)])
    monkeypatch.setattr(job.stop, "wait", lambda seconds: waits.append(seconds))
    job.work()
    assert job.error is None
    assert waits == [7.0, pytest.approx(60, abs=1)]


def test_a_server_that_wants_to_be_left_alone_for_an_hour_is(server: Server, tmp_path: Path) -> None:
    server.always["a"] = "429 3600"
    with pytest.raises(ValueError, match=r"/a: asks to wait for 3600 s; try again then"):
        download([server.remote("a", tmp_path)])


def test_without_a_network_there_is_one_clear_line(tmp_path: Path) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as closed:
        url = f"http://127.0.0.1:{closed.server_port}/a"
    with pytest.raises(
        ValueError, match=r"^cannot reach 127.0.0.1:\d+ \(Connection refused\): connect to the"
    ) as caught:
        download([Remote(url, tmp_path / "a")])
    assert f"put the files into {tmp_path} by hand" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_interrupt_stops_at_once_and_what_arrived_is_kept(server: Server, tmp_path: Path) -> None:
    server.files["a"] = CONTENT
    server.faults["a"] = ["short", "429 200"]

    def interrupt(done: int, total: int) -> None:
        if done >= len(CONTENT) // 2:
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        download([server.remote("a", tmp_path)], progress=interrupt)
    assert time.monotonic() - start < 100
    assert (tmp_path / ".part-a").read_bytes() == CONTENT[: len(CONTENT) // 2]


def test_a_full_disk_is_the_systems_error(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["a"] = CONTENT

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        download([server.remote("a", tmp_path)])


def test_https_is_never_left_for_http() -> None:
    request = module.urllib.request.Request("https://example.org/a")
    with pytest.raises(ValueError, match=r"redirected to http://example.org/b, which is not https"):
        module._Redirects().redirect_request(request, None, 302, "", {}, "http://example.org/b")


# The data sets.


def zipped(names: dict[str, bytes], mode: int = 0o644) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in names.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = mode << 16
            archive.writestr(member, content)
    return buffer.getvalue()


BUNDLE = {"eval_bundle/core.yaml": b"tasks", "eval_bundle/eval_data/a/b.jsonl": b"{}", "__MACOSX/x": b"junk"}


def test_fineweb_edu_is_the_first_shards_and_the_last_for_validation(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["shard_00000.parquet", "shard_00001.parquet", "shard_01822.parquet"]
    server.files = {name: name.encode() for name in names}
    monkeypatch.setattr(public, "FINEWEB_EDU_URL", server.url("")[:-1])
    paths = public.fetch_fineweb_edu(tmp_path, 2, connections=2)
    assert [path.name for path in paths] == names
    assert left_over(tmp_path / "fineweb-edu") == names
    for shards in (0, 1823):
        with pytest.raises(ValueError, match=rf"--shards {shards}: there are 1822 for training; give from 1"):
            public.fetch_fineweb_edu(tmp_path, shards, connections=2)


def test_the_eval_bundle_is_unpacked_and_found(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["eval_bundle.zip"] = zipped(BUNDLE)
    monkeypatch.setattr(public, "CORE_URL", server.url("eval_bundle.zip"))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert public.core_bundle() is None
    folder = public.fetch_core(tmp_path)
    assert folder == public.core_bundle() == tmp_path / "core"
    assert (folder / "core.yaml").read_bytes() == b"tasks"
    assert (folder / "eval_data/a/b.jsonl").read_bytes() == b"{}"
    assert left_over(tmp_path) == ["core"]
    assert public.fetch_core(tmp_path) == folder
    assert len(server.ranges["eval_bundle.zip"]) == 1


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        (b"no archive", "File is not a zip file"),
        (zipped({"eval_bundle/../../evil": b""}), r"a member is named 'eval_bundle/\.\./\.\./evil'"),
        (zipped({"/eval_bundle/evil": b""}), "a member is named '/eval_bundle/evil'"),
        (zipped({"eval_bundle\\..\\evil": b""}), "a member is named"),
        (zipped({"C:evil": b""}), "a member is named 'C:evil'"),
        (zipped({"eval_bundle/link": b"/etc"}, mode=0o120777), "its member 'eval_bundle/link' is a link"),
        (zipped({"other/core.yaml": b""}), "it has no folder eval_bundle"),
        (zipped({"eval_bundle/zeros": bytes(3 << 20)}), "it would unpack into more than"),
        (zipped(BUNDLE).replace(b"tasks", b"tasKs", 1)[:-60], "File is not a zip file"),
        (zipped({"eval_bundle/a": CONTENT[:5000]}).replace(CONTENT[100:200], bytes(100)), "Bad CRC-32|invalid"),
    ],
)
def test_a_damaged_or_escaping_archive_is_refused_entirely(
    archive: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public, "MOST_BYTES", 2 << 20)
    (tmp_path / "a.zip").write_bytes(archive)
    with pytest.raises(ValueError, match=rf"a\.zip cannot be unpacked \(.*({reason}).*\): delete it and download it"):
        public.unzip(tmp_path / "a.zip", tmp_path / "out", "eval_bundle")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "evil").exists()


def test_the_cache_folder_is_the_environments_or_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/me/.cache/expert-threshold")
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/cache")
    assert cache_folder() == Path("/tmp/cache/expert-threshold")
    monkeypatch.setenv(VARIABLE, "~/mine")
    assert cache_folder() == Path("/home/me/mine")


def test_a_cache_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be written \(.*\): name another cache with --cache or EXPERT_"):
        require_writable(tmp_path / "file" / "folder")

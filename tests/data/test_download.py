"""Downloads from a stand-in for the Hugging Face hub that does much wrong, and the data sets that they are for."""

from __future__ import annotations

import http.client
import http.server
import importlib
import io
import random
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from expert_threshold.data import public
from expert_threshold.data.public import VARIABLE, cache_folder, download, fetch, unzip
from hub import Handler, Server, hub_server, point_at

hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub: pip install -e '.[hub]'")
hub_constants = importlib.import_module("huggingface_hub.constants")

CONTENT = random.Random(0).randbytes(300_000)
SET = "someone/text"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with hub_server(monkeypatch) as server:
        yield server


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_missing_files_arrive_and_nothing_else_is_left(server: Server, tmp_path: Path) -> None:
    server.files = {"a": CONTENT, "folder/b": CONTENT[:5], "c": CONTENT[:9], "there": b"theirs"}
    (tmp_path / "there").write_bytes(b"mine")
    seen: list[tuple[int, int]] = []
    download(SET, ["a", "folder/b", "there"], tmp_path, lambda done, total: seen.append((done, total)))
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert (tmp_path / "folder" / "b").read_bytes() == CONTENT[:5]
    assert (tmp_path / "there").read_bytes() == b"mine"
    assert left_over(tmp_path) == ["a", "folder", "there"]
    assert seen == sorted(seen)
    assert seen[-1] == (len(CONTENT) + 5, len(CONTENT) + 5)
    with pytest.raises(ValueError, match="someone/text has no file missing on the Hugging Face hub"):
        download(SET, ["a", "missing"], tmp_path)


def test_the_next_call_goes_on_after_the_last_complete_file(server: Server, tmp_path: Path) -> None:
    server.files = {"a": CONTENT, "b": CONTENT[::-1]}
    server.faults["b"] = ["403"]
    with pytest.raises(ValueError, match=r"someone/text cannot be downloaded from the Hugging Face hub \(.*403"):
        download(SET, ["a", "b"], tmp_path)
    download(SET, ["a", "b"], tmp_path)
    assert left_over(tmp_path) == ["a", "b"]
    assert server.sent["a"] == 1


def test_contents_are_checked_against_the_hash_that_the_hub_states(server: Server, tmp_path: Path) -> None:
    server.files["a"] = CONTENT
    server.faults["a"] = ["garbled"]
    with pytest.raises(ValueError, match=r"a arrived with sha256 .*, but the hub lists .*; try again"):
        download(SET, ["a"], tmp_path)
    assert not (tmp_path / "a").exists()
    download(SET, ["a"], tmp_path)
    assert (tmp_path / "a").read_bytes() == CONTENT


@pytest.mark.parametrize("offline", [True, False])
def test_without_a_network_one_line_says_so(offline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as closed:
        url = f"http://127.0.0.1:{closed.server_port}"
    point_at(url, monkeypatch)
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(ValueError, match=f"^{SET} cannot be downloaded .* check the name and the network"):
        download(SET, ["a"], tmp_path)
    with pytest.raises(ValueError, match=f"^{url}/a cannot be downloaded .*Connection refused.* check the network"):
        fetch(f"{url}/a", tmp_path / "a")


def test_without_the_library_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"access to the Hugging Face hub needs huggingface_hub: .*\[hub\]"):
        download(SET, ["a"], tmp_path)


def test_a_full_disk_is_the_systems_error(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["a"] = CONTENT
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(hub.HfApi, "hf_hub_download", mock.Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left"):
        download(SET, ["a"], tmp_path)


@pytest.mark.parametrize("fault", ["short", "404", "no length"])
def test_a_single_file_is_whole_or_absent(fault: str, server: Server, tmp_path: Path) -> None:
    server.files["a"] = CONTENT
    server.faults["a"] = [fault]
    with pytest.raises(ValueError, match="/a cannot be downloaded"):
        fetch(server.url("a"), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    fetch(server.url("a"), tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_a_redirect_from_https_to_http_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = mock.MagicMock(url="http://a/b")
    reply.__enter__.return_value = reply
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: reply)
    with pytest.raises(ValueError, match="redirects to http://a/b, which is not https"):
        fetch("https://a/b", tmp_path / "b")
    assert left_over(tmp_path) == []


# The data sets.


def no_progress(done: int, total: int) -> None: ...


def zipped(names: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in names.items():
            archive.writestr(name, content)
    return buffer.getvalue()


BUNDLE = {"eval_bundle/core.yaml": b"tasks", "eval_bundle/eval_data/a/b.jsonl": b"{}", "__MACOSX/x": b"junk"}


def test_fineweb_edu_is_the_first_shards_and_the_last_for_validation(server: Server, tmp_path: Path) -> None:
    names = ["shard_00000.parquet", "shard_00001.parquet", "shard_01822.parquet"]
    server.files = {name: name.encode() for name in names}
    paths = public.fetch_fineweb_edu(tmp_path, 2, no_progress)
    assert [path.name for path in paths] == names
    assert left_over(tmp_path / "fineweb-edu") == names
    with pytest.raises(ValueError, match=r"--shards 1823 must be a number from 1 to 1822"):
        public.fetch_fineweb_edu(tmp_path, 1823, no_progress)


def test_any_data_set_is_downloaded_by_its_name(server: Server, tmp_path: Path) -> None:
    names = ["README.md", "notes.txt", "data/train-0.jsonl.gz", "data/train-1.jsonl.gz", "data/test-0.jsonl.gz"]
    server.files = {name: name.encode() for name in names}
    folder = public.fetch_dataset(tmp_path, SET, "data/train-*", no_progress)
    assert left_over(folder / "data") == ["train-0.jsonl.gz", "train-1.jsonl.gz"]
    assert public.fetch_dataset(tmp_path, SET, "*", no_progress) == folder
    assert left_over(folder) == ["data"]
    assert left_over(folder / "data") == ["test-0.jsonl.gz", "train-0.jsonl.gz", "train-1.jsonl.gz"]
    with pytest.raises(ValueError, match=r"has no .* file that matches \*\.parquet"):
        public.fetch_dataset(tmp_path, SET, "*.parquet", no_progress)


def test_the_eval_bundle_is_unpacked_and_found(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["eval_bundle.zip"] = zipped(BUNDLE)
    monkeypatch.setattr(public, "CORE_URL", server.url("eval_bundle.zip"))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert public.core_bundle() is None
    folder = public.fetch_core(tmp_path, no_progress)
    assert folder == public.core_bundle() == tmp_path / "core"
    assert (folder / "core.yaml").read_bytes() == b"tasks"
    assert (folder / "eval_data/a/b.jsonl").read_bytes() == b"{}"
    assert left_over(tmp_path) == ["core"]
    assert public.fetch_core(tmp_path, no_progress) == folder
    assert server.sent["eval_bundle.zip"] == 1


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        (b"no archive", "File is not a zip file"),
        (zipped({"other/core.yaml": b""}), "it has no folder eval_bundle"),
        (zipped({"eval_bundle/a": CONTENT[:5000]}).replace(CONTENT[100:200], bytes(100)), "Bad CRC-32|invalid"),
        (zipped({"eval_bundle/a": bytes(10_001)}), "it would unpack into more than"),
    ],
)
def test_a_damaged_or_oversized_archive_is_refused_entirely(
    archive: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public, "MOST_BYTES", 10_000)
    (tmp_path / "a.zip").write_bytes(archive)
    with pytest.raises(ValueError, match=rf"a\.zip cannot be unpacked \(.*({reason}).*\); delete it and download it"):
        unzip(tmp_path / "a.zip", tmp_path / "out", "eval_bundle")
    assert left_over(tmp_path) == ["a.zip"]


def test_an_archive_writes_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zipped(BUNDLE | {"../../evil": b"", "/evil": b"", "eval_bundle/../../evil": b""}))
    unzip(tmp_path / "a.zip", tmp_path / "in" / "out", "eval_bundle")
    assert not (tmp_path / "evil").exists()
    assert left_over(tmp_path / "in") == ["out"]


def test_the_cache_folder_is_the_environments_or_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/me/.cache/expert-threshold")
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/cache")
    assert cache_folder() == Path("/tmp/cache/expert-threshold")
    monkeypatch.setenv(VARIABLE, "~/mine")
    assert cache_folder() == Path("/home/me/mine")

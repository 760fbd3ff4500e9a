"""Whatever file is loaded, no code of it runs: nothing is unpickled, imported, executed or started."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cases import et, write_bundle, write_shards, write_text
from commands import edit
from expert_threshold import full_run
from expert_threshold.analysis.records import read_run
from expert_threshold.data import open_source
from expert_threshold.evaluation import read_bundle
from expert_threshold.runs import checkpoint
from expert_threshold.train import prepare

RUNS_CODE = ("pickle.find_class", "import",  "exec", "marshal.loads", "ctypes.dlopen", "os.system",
             "os.exec", "os.posix_spawn", "subprocess.Popen")  # fmt: skip
seen: list[str] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook, which stays for the rest of the process, and is silent while `seen` is None."""
    if seen is not None and event in RUNS_CODE and arguments != ("libc.so.6",):  # loaded to configure malloc
        seen.append(f"{event} {arguments!r:.200}")


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    global seen
    if not hasattr(sys, "_et_watched"):
        sys.addaudithook(_watch)
        sys._et_watched = True  # type: ignore[attr-defined]
    seen = []
    try:
        yield seen
    finally:
        seen = None


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, owned: Path) -> None:
        self.owned = owned

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.owned),)


def payloads(owned: Path) -> dict[str, bytes]:
    """Files that make the folder `owned` if anything runs them."""
    archive = io.BytesIO()
    torch.save({"model": Evil(owned)}, archive)
    arrays = io.BytesIO()
    np.savez(arrays, **{name: np.array([Evil(owned)], object) for name in ("ids", "offsets", "bytes", "fault")})
    return {
        "pickle": pickle.dumps(Evil(owned)),
        "torch.save": archive.getvalue(),
        "python": f"import os\nos.mkdir({str(owned)!r})\n".encode(),
        "numpy": arrays.getvalue(),
        "yaml": f"icl_tasks: !!python/object/apply:os.mkdir [{str(owned)!r}]\n".encode(),
        "json": json.dumps({"format": f"__import__('os').mkdir('{owned}')", "rule": {"name": "os:mkdir"}}).encode(),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of everything that the package loads. No test may change it."""
    folder = tmp_path_factory.mktemp("loaded")
    text = write_text(folder / "corpus.jsonl")
    small = ["--layers", 2, "--d-model", 16, "--model.heads", 1, "--context", 16, "--vocab-size", 270]
    quick = ["--steps", 2, "--batch-size", 2, "--checkpoint-every", 1, "--log-every", 1, "--eval-tokens", 64]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert et("train", "tiny", "--data", text, "--out", folder / "run", "--threads", 1, *small, *quick) == 0
        shutil.rmtree(folder / "run/checkpoints/step_000002")
        assert et("evaluate", folder / "run") == 0
        assert et("export", folder / "run", "--to", folder / "exported") == 0
        write_shards(folder / "shards", [f"the cat sat on the mat {i}" for i in range(180)], 2)
        tokenizer = ["--tokenizer", folder / "run/tokenizer.json"]
        assert et("data", "tokenize", folder / "shards", *tokenizer, "--out", folder / "tokens") == 0
    (folder / "options.json").write_bytes((folder / "run/config.json").read_bytes())
    rows = [{"context": "the cat", "continuation": " sat"}] * 2
    write_bundle(folder / "bundle", {"t": ("language_modeling", 0, 0.0, rows)})
    return folder


def read_source(path: Path) -> None:
    corpus = open_source(str(path))
    for split in ("train", "validation"):
        assert list(corpus.documents(split))


LOADERS: dict[str, Callable[[Path], object]] = {
    "run": lambda run: [et("train", "--resume", run), et("evaluate", run), et("export", run, "--to", f"{run}-out")],
    "exported": lambda path: et("import", path, "--out", f"{path}-out"),
    "shards": read_source,
    "tokens": read_source,
    "corpus.jsonl": read_source,
    "bundle": read_bundle,
    "options.json": lambda path: et("plan", "tiny", "--config", path),
}
"""How each is loaded. Commands report a file that they refuse, the functions raise ValueError."""


@pytest.mark.parametrize("name", LOADERS)
def test_no_file_runs_code_when_it_is_loaded(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_run, "write_report", read_run)
    monkeypatch.setattr(prepare, "_commit", lambda: None)  # which asks git
    owned, place = tmp_path / "owned", tmp_path / name

    def load() -> list[str]:
        quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with quiet[0], quiet[1], watched() as events, contextlib.suppress(ValueError):
            LOADERS[name](place)
        shutil.rmtree(f"{place}-out", ignore_errors=True)
        return events

    def fresh() -> None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder / name, place) if (folder / name).is_dir() else shutil.copy(folder / name, place)

    fresh()
    load()  # imports what it needs
    every = sorted((folder / name).rglob("*"))
    files = [path.relative_to(folder / name) for path in every if path.is_file()] or [Path()]
    for file in files:
        for content in payloads(owned).values():
            fresh()
            (place / file).write_bytes(content)
            if file.parent.name.startswith("step_") and file.name != "manifest.json":  # as whoever made it would
                with edit((place / file).with_name("manifest.json")) as manifest:
                    manifest["files"][file.name] = checkpoint._fingerprint(place / file)
            assert (load() and load()) == []  # only the first may import what an error needs
            assert not owned.exists()


@pytest.mark.parametrize("uri", ["../../corpus.jsonl", "/etc/passwd", "a/../../x.jsonl"])
def test_a_bundle_cannot_lead_out_of_its_folder(uri: str, folder: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(folder / "bundle", tmp_path / "bundle"))
    (bundle / "core.yaml").write_text((bundle / "core.yaml").read_text().replace("t.jsonl", uri))
    with pytest.raises(ValueError, match=rf"core\.yaml is damaged \({uri} points outside the bundle\)"):
        read_bundle(bundle)


def test_the_watch_sees_code_that_runs(tmp_path: Path) -> None:
    with watched() as events:
        pickle.loads(payloads(tmp_path / "owned")["pickle"])
    assert events
    assert (tmp_path / "owned").exists()

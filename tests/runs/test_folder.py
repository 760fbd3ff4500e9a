"""The run folder: its configuration, metrics, lock and trained model."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import small_model, write_run
from commands import edit
from expert_threshold.data import Tokenizer
from expert_threshold.model import GPT
from expert_threshold.runs import Metrics, RunFolder, load_model
from expert_threshold.runs.folder import derive

CONFIG = {"model": {"layers": 2}, "seed": 0, "note": "σ(r)"}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "runs" / "first")
    run.write_config(CONFIG)
    return run


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """The operating system itself fails larger writes, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_configuration_reads_back_as_written_and_holds_no_nan(run: RunFolder) -> None:
    with pytest.raises(ValueError, match="JSON"):
        run.write_config({"learning_rate": float("nan")})
    assert RunFolder.open(run.path).config == CONFIG


def test_a_full_disk_leaves_the_old_configuration_and_tokenizer(run: RunFolder) -> None:
    run.write_config({"model": {"vocab_size": 257}})
    run.write_tokenizer(Tokenizer.train(["abc"], 257))
    with files_no_larger_than(50), pytest.raises(OSError, match=r"too large: .*config\.json"):
        run.write_config({"seed": 1})
    with files_no_larger_than(50), pytest.raises(OSError, match=r"too large: .*tokenizer\.json"):
        run.write_tokenizer(Tokenizer.train(["abcabc"], 258))
    assert run.config == {"model": {"vocab_size": 257}}
    assert run.tokenizer().vocab_size == 257
    assert sorted(path.name for path in run.path.iterdir()) == ["config.json", "tokenizer.json"]


def test_a_linked_file_stays_linked_when_it_is_replaced(run: RunFolder, tmp_path: Path) -> None:
    """Resuming put a file of its own in the place of a linked metrics.jsonl, and left what was linked behind."""
    moved, metrics = tmp_path / "disk.jsonl", run.metrics
    metrics.append({"step": 1, "split": "train"})
    metrics.path.rename(moved)
    metrics.path.symlink_to(moved)
    metrics.truncate_after(0)
    assert metrics.path.is_symlink()
    assert moved.read_bytes() == b""


def test_a_link_to_an_empty_folder_may_become_a_derived_run(run: RunFolder, tmp_path: Path) -> None:
    run.write_config({"model": {"vocab_size": 257}, "rule": {}})
    run.write_tokenizer(Tokenizer.train(["abc"], 257))
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk", target_is_directory=True)
    derive(run, tmp_path / "link", 3, {}, model={"vocab_size": 257})
    assert (tmp_path / "link").is_symlink()
    assert RunFolder.open(tmp_path / "link").checkpoints() == [3]


def test_a_tokenizer_of_another_model_is_refused(run: RunFolder) -> None:
    run.write_config({"model": {"vocab_size": 300}})
    run.write_tokenizer(Tokenizer.train(["abc"], 257))
    with pytest.raises(ValueError, match=r"tokenizer\.json has 257 tokens, but config\.json says 300;"):
        run.tokenizer()
    run.tokenizer_path.unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        run.tokenizer()


def test_only_a_folder_that_is_empty_or_holds_what_a_killed_run_left_can_become_a_run(tmp_path: Path) -> None:
    assert RunFolder.create(tmp_path).path == tmp_path
    (tmp_path / ".lock").write_text('{"pid": 4194305, "host": "here", "process": "dead"}')
    (tmp_path / ".tmp-config.json").write_text("{")
    assert RunFolder.create(tmp_path).path == tmp_path
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match="already exists"):
            RunFolder.create(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "not a run folder"),
        ("{", "config.json is damaged or was not written by expert-threshold"),
        ("[]", "config.json is damaged or was not written by expert-threshold"),
        ("[" * 100_000, "config.json is damaged or was not written by expert-threshold"),
        ('{"model_type": "llama"}', "not written by expert-threshold"),
        ('{"format": "expert-threshold run", "version": 3}', "format version 3"),
    ],
)
def test_a_foreign_folder_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        RunFolder.open(tmp_path)


# Metrics

numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
own = st.fixed_dictionaries({"step": st.integers(0, 9), "split": st.sampled_from(["train", "validation"])})
records = st.lists(st.builds(dict.__or__, st.dictionaries(st.text(), values, max_size=3), own), max_size=5)


def metrics_with(folder: Path, lines: list[dict[str, Any]]) -> Metrics:
    metrics = Metrics(folder / "metrics.jsonl")
    metrics.path.unlink(missing_ok=True)
    for line in lines:
        metrics.append(line)
    return metrics


@given(lines=records, cut=st.integers(0, 10_000), step=st.integers(-1, 10))
def test_metrics_read_back_as_appended_and_a_file_cut_anywhere_and_truncated_loses_only_the_lines_after(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]], cut: int, step: int
) -> None:
    metrics = metrics_with(tmp_path_factory.getbasetemp(), lines)
    content = metrics.path.read_bytes()[:cut] if lines else b""
    metrics.path.write_bytes(content)
    whole, more = lines[: content.count(b"\n")], {"step": 10, "split": "train"}
    logging.disable(logging.WARNING)
    try:
        assert metrics.read() == whole
        metrics.truncate_after(step)
    finally:
        logging.disable(logging.NOTSET)
    metrics.append(more)
    assert metrics.read() == [*(line for line in whole if line["step"] <= step), more]


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    line = {"step": 1, "split": "train", "loss": float("nan"), "layers": {"1": {"cutoff": [float("inf"), 0.5]}}}
    metrics = metrics_with(tmp_path, [line])
    assert "NaN" not in metrics.path.read_text()
    assert metrics.read() == [{**line, "loss": None, "layers": {"1": {"cutoff": [None, 0.5]}}}]


@pytest.mark.parametrize("torn", [b'{"step": 2, "spl', b'{"step": 2, "split": "train"}', b"\0\0\0\n", b"\xff"])
def test_a_torn_last_line_is_left_out_and_reported(tmp_path: Path, torn: bytes, caplog: Any) -> None:
    metrics = metrics_with(tmp_path, [{"step": 1, "split": "train"}])
    with metrics.path.open("ab") as file:
        file.write(torn)
    assert metrics.read() == [{"step": 1, "split": "train"}]
    assert "line 2 is incomplete" in caplog.text


@pytest.mark.parametrize("damaged", [b"{", b"", b"[1]", b'{"step": 1}', b'{"step": "1", "split": "train"}'])
def test_damage_before_the_last_line_is_an_error_that_names_the_line(tmp_path: Path, damaged: bytes) -> None:
    metrics = metrics_with(tmp_path, [{"step": 1, "split": "train"}])
    content = metrics.path.read_bytes()
    metrics.path.write_bytes(content + damaged + b"\n" + content)
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 2 is damaged"):
        metrics.read()


def test_a_full_disk_adds_no_part_of_a_line(tmp_path: Path) -> None:
    metrics = metrics_with(tmp_path, [{"step": 1, "split": "train"}])
    before = metrics.path.read_bytes()
    for room in (0, 5):
        with files_no_larger_than(len(before) + room), pytest.raises(OSError, match=r"(too large|No space).*metrics"):
            metrics.append({"step": 2, "split": "train"})
        assert metrics.path.read_bytes() == before


# Lock


def test_a_second_trainer_is_refused_by_name_and_the_lock_is_given_back(run: RunFolder) -> None:
    with run.lock():
        with pytest.raises(ValueError, match=rf"is in use by process {os.getpid()} on "), run.lock():
            pass
        with pytest.raises(ValueError, match="is in use by"), RunFolder.open(run.path).lock():
            pass
    with run.lock():
        pass
    assert not (run.path / ".lock").exists()


def test_a_stale_lock_file_is_taken_over_and_removed(run: RunFolder) -> None:
    (run.path / ".lock").write_text("process 1 on elsewhere, long gone")
    with run.lock():
        assert (run.path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert [path.name for path in run.path.iterdir()] == ["config.json"]


def test_a_lock_removed_between_open_and_lock_is_created_again(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes held the lock: one on the removed file, one on its successor."""
    flock, lock = fcntl.flock, run.path / ".lock"

    def late(file: Any, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        lock.unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with run.lock(), pytest.raises(ValueError, match="is in use by"), run.lock():
        pass


# The trained model


Trained = tuple[RunFolder, GPT]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    model = small_model(steps=1)
    run = write_run(tmp_path_factory.mktemp("trained"), model, step=1)
    model.train().update_rules(model(torch.arange(32)[None]).observations)
    run.save_checkpoint(2, {"model": model.state_dict(), "optimizer": {"m": torch.zeros(3)}}, {})
    return run, model


def test_a_loaded_model_is_the_saved_one_in_evaluation_mode(trained: Trained) -> None:
    run, model = trained
    loaded, tokenizer = load_model(run.path)
    assert tokenizer.vocab_size == 270
    assert not any(module.training for module in loaded.modules())
    torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(loaded(tokens).logits, model.eval()(tokens).logits, rtol=0, atol=0)


def test_weights_loaded_as_bfloat16_compute_the_same_as_weights_cast_per_forward(trained: Trained) -> None:
    run, model = trained
    loaded, _ = load_model(run.path, compute_dtype=torch.bfloat16)
    casting = GPT(model.config, torch.bfloat16)
    casting.load_state_dict(model.state_dict())
    tokens = torch.arange(16)[None]
    assert torch.equal(loaded(tokens).logits, casting.eval()(tokens).logits)
    dtypes = {name.split(".")[-2]: weight.dtype for name, weight in loaded.named_parameters()}
    assert dtypes["router"] == torch.float32
    assert dtypes["head"] == dtypes["embed"] == dtypes["experts"] == torch.bfloat16


def test_an_earlier_step_can_be_loaded(trained: Trained) -> None:
    run, _ = trained
    updates = [load_model(run.path, step)[0].moe_layers()[0][1].router.state.step for step in (1, 2, None)]
    assert updates == [1, 2, 2]


def test_a_model_is_not_loaded_with_another_option_than_it_was_made_with(trained: Trained, tmp_path: Path) -> None:
    """A bit that flips in config.json made another model of the same weights."""
    run, model = trained
    made = derive(run, tmp_path / "made", 1, model.state_dict(), model={})
    with edit(made.path / "config.json") as config:
        config["model"]["qk_scale"] = 1.5
    with pytest.raises(ValueError, match=r"config\.json: model\.qk_scale=1\.5 differs from the option that step 1 was"):
        load_model(made.path)


def test_weights_that_the_configuration_does_not_describe_are_refused(trained: Trained, tmp_path: Path) -> None:
    run, model = trained
    other = RunFolder.create(tmp_path / "other")
    other.write_config(run.config)
    weights = model.state_dict()
    del weights["head.weight"]
    other.save_checkpoint(1, {"model": weights}, {})
    with pytest.raises(ValueError, match=r"does not match config\.json.*head\.weight") as error:
        load_model(other.path)
    assert "\n" not in str(error.value)

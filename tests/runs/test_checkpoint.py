"""Checkpoints are there whole or not at all, and no damage to them goes unnoticed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from commands import edit
from expert_threshold.runs import Checkpoint, RunFolder, checkpoint

from .test_folder import files_no_larger_than

TENSORS = {
    "model": {
        "weight": torch.arange(6.0).reshape(2, 3).T,  # not contiguous
        "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "steps": torch.tensor(3),
        "empty": torch.zeros(0, 4),
    },
    "optimizer": {"b.momentum": torch.eye(2)[1], "random": torch.arange(5, dtype=torch.uint8)},
}
STATE = {"position": {"epoch": 1, "offset": 12}, "loss": 0.1 + 0.2, "name": "σ"}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run with whole checkpoints of steps 50 and 100."""
    run = RunFolder.create(tmp_path / "run")
    run.write_config({})
    run.save_checkpoint(50, TENSORS, {**STATE, "step": 50})
    run.save_checkpoint(100, TENSORS, {**STATE, "step": 100})
    return run


def names(run: RunFolder) -> list[str]:
    return sorted(path.name for path in (run.path / "checkpoints").iterdir())


def assert_same(found: Checkpoint, step: int) -> None:
    assert (found.step, found.state) == (step, {**STATE, "step": step})
    assert found.tensors.keys() == TENSORS.keys()
    for part, named in TENSORS.items():
        assert found.tensors[part].keys() == named.keys()
        for name, tensor in named.items():
            assert found.tensors[part][name].dtype == tensor.dtype
            torch.testing.assert_close(found.tensors[part][name], tensor, rtol=0, atol=0, equal_nan=True)


def test_a_checkpoint_loads_as_it_was_saved_and_what_is_loaded_does_not_write_through(run: RunFolder) -> None:
    run.load_checkpoint().tensors["model"]["weight"].zero_()
    assert_same(run.load_checkpoint(), 100)
    assert_same(run.load_checkpoint(50), 50)


def test_only_the_parts_asked_for_are_read(run: RunFolder) -> None:
    (run.path / "checkpoints/step_000100/optimizer.safetensors").unlink()
    assert run.load_checkpoint(parts=("model",)).tensors.keys() == {"model"}
    with pytest.raises(ValueError, match="contains no controller"):
        run.load_checkpoint(parts=("model", "controller"))


def test_every_file_of_a_checkpoint_has_the_mode_of_an_ordinary_file(run: RunFolder) -> None:
    files = [path for path in (run.path / "checkpoints").rglob("*") if path.is_file()]
    assert {path.stat().st_mode for path in files} == {(run.path / "config.json").stat().st_mode}


def test_steps_are_ordered_as_numbers(run: RunFolder) -> None:
    run.save_checkpoint(1_000_000, {}, {})
    assert run.checkpoints() == [50, 100, 1_000_000]
    assert run.latest_checkpoint() == 1_000_000


def test_a_step_that_was_not_saved_is_refused_with_those_that_were(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no checkpoint of step 70; choose from 50, 100"):
        run.load_checkpoint(70)
    new = RunFolder.create(tmp_path / "new")
    assert new.latest_checkpoint() is None
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        new.load_checkpoint()


# Damage


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_flipped_bit_anywhere_is_noticed(run: RunFolder, data: st.DataObject) -> None:
    folder = run.path / "checkpoints/step_000100"
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(path.read_bytes())
    whole = bytes(content)
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        with pytest.raises(ValueError, match=r"step_000100/.*; remove .*step_000100 to fall back on step_000050"):
            run.load_checkpoint()
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"])
def test_a_missing_or_cut_file_is_named_with_the_checkpoint_to_fall_back_on(run: RunFolder, name: str) -> None:
    path, earlier = run.path / "checkpoints/step_000100" / name, run.path / "checkpoints/step_000050" / name
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match=rf"^.*{name}.*damaged.*step_000050, which is intact$"):
        run.load_checkpoint()
    path.unlink()
    with pytest.raises(ValueError, match=rf"{name} is missing.*step_000050, which is intact"):
        run.load_checkpoint()
    earlier.unlink()
    with pytest.raises(ValueError, match=f"{name} is missing; no earlier checkpoint is intact"):
        run.load_checkpoint()


OUTSIDE = ("../step_000050/model.safetensors", "/etc/passwd", "a/b.safetensors", "code.pkl", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "pytorch"}, "is damaged or was not written by expert-threshold"),
        ({"version": 2}, "format version 2"),
        ({"step": 99}, "damaged"),
        ({"files": {}}, "damaged"),
        ({"files": []}, "damaged"),
        ({"files": {"state.json": 1}}, "damaged"),
        ({"files": {"state.json": {"size": None, "sha256": ""}}}, "damaged"),
        ({"files": {"state.json": {"size": 1}}}, "damaged"),
        *(({"files": {name: 1, "state.json": 1}}, "which is not a file of a checkpoint") for name in OUTSIDE),
    ],
)
def test_a_foreign_manifest_or_one_that_leads_out_of_its_folder_is_refused(
    run: RunFolder, change: dict[str, object], message: str
) -> None:
    with edit(run.path / "checkpoints/step_000100/manifest.json") as manifest:
        manifest |= change
    with pytest.raises(ValueError, match=message):
        run.load_checkpoint()


def test_a_part_with_the_right_hash_that_is_no_safetensors_file_is_refused(run: RunFolder) -> None:
    folder = run.path / "checkpoints/step_000100"
    (folder / "model.safetensors").write_bytes(b"cos\nsystem\n(S'true'\ntR.")  # a pickle
    with edit(folder / "manifest.json") as manifest:
        manifest["files"]["model.safetensors"] = checkpoint._fingerprint(folder / "model.safetensors")
    with pytest.raises(ValueError, match="remove"):
        run.load_checkpoint()


# Failures while saving


@pytest.mark.parametrize("size", [0, 40, 200, 400])
def test_a_full_disk_while_saving_harms_nothing_that_was_saved(run: RunFolder, size: int) -> None:
    with files_no_larger_than(size), pytest.raises(OSError, match=r"too large"):
        run.save_checkpoint(150, TENSORS, STATE)
    assert names(run) == ["step_000050", "step_000100"]
    assert_same(run.load_checkpoint(), 100)


@pytest.mark.parametrize("function", ["_write_tensors", "_fingerprint", "write_synced", "sync_folder"])
@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), RuntimeError("bug")]
)
def test_a_failure_at_any_stage_leaves_the_earlier_checkpoints_alone(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, function: str, failure: BaseException
) -> None:
    def fail(*arguments: object) -> None:
        raise failure

    monkeypatch.setattr(checkpoint, function, fail)
    with pytest.raises(type(failure)):
        run.save_checkpoint(150, TENSORS, STATE, keep=1)
    monkeypatch.undo()
    assert names(run) == ["step_000050", "step_000100"]
    assert_same(run.load_checkpoint(), 100)


def test_a_disk_that_fills_inside_safetensors_is_an_os_error(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*model\.safetensors") as error:
        run.save_checkpoint(150, TENSORS, STATE)
    assert error.value.errno == errno.ENOSPC


# Saving again, and removing old ones


@pytest.mark.parametrize("linked", [False, True])
def test_leftovers_are_ignored_and_removed_but_not_their_targets(run: RunFolder, tmp_path: Path, linked: bool) -> None:
    folder = run.path / "checkpoints/step_000050"
    moved = move_and_link(folder, tmp_path / "disk") if linked else tmp_path
    folder.rename(run.path / "checkpoints/.tmp-step_000050")
    assert run.checkpoints() == [100]
    run.save_checkpoint(200, TENSORS, STATE)
    assert names(run) == ["step_000100", "step_000200"]
    assert moved.is_dir()


def test_saving_a_step_again_replaces_only_a_damaged_checkpoint(run: RunFolder) -> None:
    folder = run.path / "checkpoints/step_000100"
    before = folder.stat().st_ino
    run.save_checkpoint(100, TENSORS, {})
    assert folder.stat().st_ino == before
    (folder / "state.json").unlink()
    run.save_checkpoint(100, TENSORS, {**STATE, "step": 100})
    assert_same(run.load_checkpoint(), 100)


@pytest.mark.parametrize(("step", "keep", "left"), [(150, 2, [100, 150]), (150, 1, [150]), (70, 1, [70, 100])])
def test_only_the_newest_are_kept_and_the_one_just_saved(run: RunFolder, step: int, keep: int, left: list[int]) -> None:
    run.save_checkpoint(step, TENSORS, {**STATE, "step": step}, keep=keep)
    assert run.checkpoints() == left


# Checkpoints that were moved to another disk and linked back


def move_and_link(path: Path, disk: Path) -> Path:
    """Return the place of `path` after the move."""
    disk.mkdir(exist_ok=True)
    moved = disk / path.name
    path.rename(moved)
    path.symlink_to(moved, target_is_directory=True)
    return moved


def test_a_linked_checkpoint_that_is_pruned_loses_its_link_alone(run: RunFolder, tmp_path: Path) -> None:
    """shutil.rmtree refused the link, which stayed as .tmp-step_000050 and failed every later save."""
    moved = move_and_link(run.path / "checkpoints/step_000050", tmp_path / "disk")
    for step in (150, 200):
        run.save_checkpoint(step, TENSORS, {**STATE, "step": step}, keep=2)
    assert names(run) == ["step_000150", "step_000200"]
    assert (moved / "manifest.json").is_file()


def test_checkpoints_that_are_linked_as_a_whole_are_read_saved_and_pruned(run: RunFolder, tmp_path: Path) -> None:
    moved = move_and_link(run.path / "checkpoints", tmp_path / "disk")
    run.save_checkpoint(150, TENSORS, {**STATE, "step": 150}, keep=2)
    assert sorted(path.name for path in moved.iterdir()) == names(run) == ["step_000100", "step_000150"]
    assert_same(run.load_checkpoint(), 150)


@pytest.mark.parametrize("gone", [False, True])
def test_saving_again_replaces_a_link_to_a_damaged_checkpoint(run: RunFolder, tmp_path: Path, gone: bool) -> None:
    moved = move_and_link(run.path / "checkpoints/step_000100", tmp_path / "disk")
    shutil.rmtree(moved) if gone else (moved / "state.json").unlink()
    run.save_checkpoint(100, TENSORS, {**STATE, "step": 100})
    assert_same(run.load_checkpoint(), 100)
    assert not (run.path / "checkpoints/step_000100").is_symlink()


def test_a_checkpoint_on_a_missing_disk_is_not_skipped(run: RunFolder, tmp_path: Path) -> None:
    """A resumed run began again before it, or from nothing where the disk of all checkpoints was gone."""
    shutil.rmtree(move_and_link(run.path / "checkpoints/step_000100", tmp_path / "disk"))
    with pytest.raises(ValueError, match=r"step_000100/manifest.json is missing; .*step_000050, which is in"):
        run.load_checkpoint()
    (run.path / "checkpoints/step_000100").unlink()
    shutil.rmtree(move_and_link(run.path / "checkpoints", tmp_path / "disk"))
    for use in (run.latest_checkpoint, run.load_checkpoint, lambda: run.save_checkpoint(150, TENSORS, STATE)):
        with pytest.raises(ValueError, match=r"checkpoints is a link to .*disk/checkpoints, which does not exist"):
            use()


# What several ranks have saved.

WHOLE = torch.arange(12.0).reshape(6, 2)


def part(start: int, stop: int, shape: tuple[int, ...] = (6, 2)) -> checkpoint.Part:
    return checkpoint.Part(WHOLE[start:stop], start, shape)


def save_parts(run: RunFolder, *ranks: Any) -> None:
    """Step 200 as ranks save it together; each has one tensor, "weight"."""
    parent = run.path / "checkpoints"
    temporary = checkpoint.begin(parent, 200)
    files: checkpoint.Fingerprints = {}
    for rank, weight in enumerate(ranks):
        files |= checkpoint.write_files(temporary, {"model": {"weight": weight}}, rank)
    checkpoint.commit(parent, 200, files, {})


@pytest.mark.parametrize("ranks", [[(0, 6)], [(0, 2), (2, 6)], [(3, 6), (2, 3), (0, 2)], [(0, 0), (0, 6), (6, 6)]])
def test_parts_of_any_ranks_make_the_whole(run: RunFolder, ranks: list[tuple[int, int]]) -> None:
    save_parts(run, *(part(*places) for places in ranks))
    assert torch.equal(run.load_checkpoint().tensors["model"]["weight"], WHOLE)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        # As many places as the whole has, of which two came from memory that was never written.
        ([part(0, 2), part(0, 2), part(4, 6)], "weight cannot be restored: its parts overlap"),
        ([part(0, 4), part(3, 6)], "weight cannot be restored: its parts overlap"),
        ([part(0, 2)._replace(start=-4), part(2, 6)], "weight cannot be restored: its parts overlap"),
        ([part(0, 2), part(4, 6)], "weight cannot be restored: files of a rank are missing"),
        ([part(0, 2), part(2, 6)._replace(start=3)], "weight cannot be restored: files of a rank are missing"),
        ([part(0, 4)], "weight cannot be restored: files of a rank are missing"),
        ([part(0, 6, (4, 2))], "weight cannot be restored: its parts extend beyond its end"),
        ([part(0, 6, (2**50, 2))], "weight cannot be restored: files of a rank are missing"),
        ([part(0, 3), part(3, 6, (7, 2))], "weight cannot be restored: its parts belong to different tensors"),
        ([part(0, 6, (6, 3))], "weight cannot be restored: its parts belong to different tensors"),
        ([part(0, 6, (6,))], "weight cannot be restored: its parts belong to different tensors"),
        ([part(0, 3), part(3, 6)._replace(tensor=WHOLE[3:].half())], "weight cannot be restored: its parts belong to"),
        ([WHOLE, part(0, 6)], "weight cannot be restored: its parts overlap"),
        ([WHOLE[0, 0], WHOLE[0, 0]], "weight cannot be restored: its parts belong to different tensors"),
    ],
)
def test_parts_that_do_not_cover_every_place_once_are_refused(run: RunFolder, ranks: list[Any], message: str) -> None:
    save_parts(run, *ranks)
    with pytest.raises(ValueError, match=f"{message}.*remove .*step_000200 to fall back on step_000100"):
        run.load_checkpoint()

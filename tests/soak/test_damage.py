"""A bit that flips or an end that is lost, in any file: the file is named, and nothing else than before is loaded."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from campaign import campaign, trials
from cases import et
from expert_threshold.data import open_source
from expert_threshold.runs import RunFolder, load_model

from .forks import Forks, outcome


def damage(path: Path, chance: random.Random) -> bytes:
    """Flip a bit of a file or cut it; return what it was."""
    whole = path.read_bytes()
    bad = bytearray(whole)
    place = chance.randrange(len(whole))
    if chance.random() < 0.5:
        bad[place] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
    else:
        path.write_bytes(whole[:place])
    return whole


@trials(1000, few=8)
def test_no_damaged_file_of_a_run_is_loaded(
    trials: int, forks: Forks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples, the report and measurements are for people: damage there is named, or changes what they show alone."""
    whole, run = forks.folder / "whole damage", tmp_path / "run"
    assert forks.run(forks.train(whole, "--sample-every", "6")).code == 0
    RunFolder(whole).metrics.truncate_after(9)
    shutil.rmtree(whole / "checkpoints/step_000012")
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    model, tokenizer = load_model(whole)
    weights, facts = model.state_dict(), (model.config, tokenizer.hash)
    shutil.copytree(whole, run)
    assert et("train", "--resume", run) == 0
    expected = outcome(run)[2:4]
    named: Counter[str] = Counter()

    def trial(chance: random.Random) -> None:
        shutil.rmtree(run)
        shutil.copytree(whole, run)
        file = chance.choice(files)
        damage(run / file, chance)
        capsys.readouterr()
        refusal = ""
        try:
            loaded, tokenizer = load_model(run)
        except ValueError as error:
            refusal = str(error)
        if not refusal:
            assert all(torch.equal(tensor, weights[name]) for name, tensor in loaded.state_dict().items())
            assert (loaded.config, tokenizer.hash) == facts
            code = et("train", "--resume", run)
            if code == 0:
                assert outcome(run)[2:4] == expected
                return
            assert code == 2
            refusal = capsys.readouterr().err.strip()
        assert "\n" not in refusal
        named[file.parts[0]] += str(run) in refusal

    campaign("flips and truncations of a run", trials, trial)
    print(named)


@trials(100, few=20)
def test_no_damaged_shard_with_checksums_is_read(trials: int, tmp_path: Path) -> None:
    """A letter that changed was trained on."""
    for shard in range(4):
        texts = [f"document {i} of shard {shard} " + "with some words " * (i % 9) for i in range(60)]
        table = pyarrow.table({"text": texts})
        path = tmp_path / f"{shard}.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=16, write_page_checksum=True)

    def read() -> list[list[str]]:
        corpus = open_source(str(tmp_path))
        return [list(corpus.documents("train")), list(corpus.documents("validation"))]

    expected = read()

    def trial(chance: random.Random) -> None:
        path = tmp_path / f"{chance.randrange(4)}.parquet"
        whole = damage(path, chance)
        try:
            assert read() == expected
        except ValueError as error:
            if str(path) not in str(error) or "\n" in str(error):
                raise AssertionError(error) from error
        finally:
            path.write_bytes(whole)

    campaign("damaged shards", trials, trial)

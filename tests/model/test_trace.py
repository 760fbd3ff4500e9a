"""A trace contains what the model did with every token, whatever the batch size, and is never partial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from cases import small_model
from expert_threshold.model import GPT, trace
from expert_threshold.model.trace import Trace, record_trace
from expert_threshold.routing import ExpertChoice, ExpertThreshold, NullSlots, Rule, TokenChoice

RULES: dict[str, Rule | None] = {
    "token_choice": TokenChoice(12, 2, balance="loss_free"),
    "expert_choice": ExpertChoice(12, 1, pool="sequence"),
    "expert_threshold": ExpertThreshold(12, 1, warmup_steps=0),
    "dense": None,
}
CONTEXT = 8


def model_of(rule: Rule | None, **options: object) -> GPT:
    model = small_model(rule, steps=0, vocab_size=50, context=CONTEXT, **options)
    for _, moe in model.moe_layers():
        for value in moe.router.state:
            if value.is_floating_point():
                value.normal_()
    return model


def windows(rows: int) -> Tensor:
    return torch.randint(50, (rows, CONTEXT + 1), generator=torch.Generator().manual_seed(1), dtype=torch.int32)


@pytest.mark.parametrize("name", RULES)
def test_a_trace_is_what_the_model_did(name: str, tmp_path: Path) -> None:
    model, rows = model_of(RULES[name]).train(), windows(7)
    rows[-1, -1] = -1
    told: list[tuple[int, ...]] = []
    options: dict[str, Any] = {"facts": {"a": 1}, "batch_size": 2, "progress": lambda *done: told.append(done)}
    found = record_trace(model, rows, tmp_path / "t", **options)
    assert model.training
    assert told == [(16, 56), (32, 56), (48, 56), (56, 56)]
    tokens, targets = rows[:, :-1].long(), rows[:, 1:].long()
    with torch.no_grad():
        output = model.eval()(tokens, targets, record=True)
    assert (len(found), found.facts, found.context, found.rule) == (56, {"a": 1}, CONTEXT, RULES[name])
    assert found.tokens.tolist() == tokens.flatten().tolist()
    assert found.positions.tolist() == list(range(CONTEXT)) * 7
    losses = torch.from_numpy(found.losses)
    torch.testing.assert_close(losses[:-1], output.token_losses.flatten()[:-1])
    assert losses[-1].isnan()
    assert found.layers == [layer for layer, _ in model.moe_layers()]
    for layer, routing in zip(found.layers, output.routings, strict=True):
        torch.testing.assert_close(found.scores(layer), routing.scores.flatten(0, 1))
        assert torch.equal(found.assignment(layer), routing.assignment.flatten(0, 1))
        assert torch.equal(found.gates(layer), found.scores(layer).sigmoid())
        assert found.fanout(layer).tolist() == routing.assignment.sum(-1).flatten().tolist()
        moe = dict(model.moe_layers())[layer]
        for saved, value in zip(found.state(layer), moe.router.state, strict=True):
            assert saved.dtype == value.dtype
            assert torch.equal(saved, value)


def test_a_long_stream_is_written_in_pieces_that_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory holds one piece at a time."""
    model, rows = model_of(RULES["expert_threshold"]), windows(9)
    whole = record_trace(model, rows, tmp_path / "whole")
    monkeypatch.setattr(trace, "ROWS", 3 * CONTEXT)
    pieces = record_trace(model, rows, tmp_path / "pieces", batch_size=2)
    sizes = [pq.ParquetFile(tmp_path / "pieces").metadata.row_group(i).num_rows for i in range(3)]
    assert sizes == [3 * CONTEXT] * 3
    assert pq.ParquetFile(tmp_path / "whole").metadata.num_row_groups == 1
    torch.testing.assert_close(pieces.scores(2), whole.scores(2))
    assert pieces.tokens.tolist() == whole.tokens.tolist()


def test_the_fanout_norm_is_part_of_the_gates(tmp_path: Path) -> None:
    found = record_trace(model_of(RULES["expert_threshold"], gate_norm="fanout"), windows(4), tmp_path / "t")
    fanout = found.assignment(1).sum(-1)
    assert fanout.max() > 1
    torch.testing.assert_close(found.gates(1) * fanout.clamp(min=1)[:, None], found.scores(1).sigmoid())


def test_a_recording_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    model = model_of(None).train()
    with pytest.raises(KeyboardInterrupt):
        record_trace(model, windows(2), tmp_path / "t", progress=stop)
    assert list(tmp_path.iterdir()) == []
    assert model.training


def test_a_state_may_be_infinite(tmp_path: Path) -> None:
    """A running maximum starts at −∞, which strict JSON lacks."""
    model = model_of(ExpertThreshold(12, 1, warmup_steps=0))
    for _, moe in model.moe_layers():
        moe.router.state[0].fill_(-torch.inf)
    trace = record_trace(model, windows(2), tmp_path / "t")
    assert torch.equal(trace.state(trace.layers[0])[0], torch.full((12,), -torch.inf))


def test_scores_are_those_of_experts_and_no_other_slots(tmp_path: Path) -> None:
    """Regression: figures compare scores with assignments, and failed if scores were wider."""
    found = record_trace(model_of(NullSlots(12, 2)), windows(2), tmp_path / "t")
    assert found.scores(1).shape == found.gates(1).shape == found.assignment(1).shape == (16, 12)


def test_what_is_no_trace_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match="not a trace, or is damaged; delete it"):
        Trace(path)
    monkeypatch.setattr(trace, "VERSION", 0)
    record_trace(model_of(None), windows(1), tmp_path / "old")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="another version"):
        Trace(tmp_path / "old")


def test_a_column_that_is_damaged_is_refused_in_a_line(tmp_path: Path) -> None:
    found = record_trace(model_of(RULES["token_choice"]), windows(40), tmp_path / "t")
    group = pq.ParquetFile(tmp_path / "t").metadata.row_group(0)
    columns = map(group.column, range(group.num_columns))
    column = next(each for each in columns if each.path_in_schema.startswith("scores_1"))
    content = bytearray((tmp_path / "t").read_bytes())
    start = column.data_page_offset
    content[start + 40 : start + 200] = bytes(160)
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        Trace(found.path).scores(1)

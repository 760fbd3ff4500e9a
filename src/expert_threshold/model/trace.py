"""Traces: Parquet files with the routing and the loss of every token in a stream, one row per token.

    token, target    int32; target is -1 if nothing follows
    position         int32, in the model's window
    loss             float32, nats; NaN without a target
    scores_L         float32[num_scores], of layer L
    assignment_L     uint8[⌈experts / 8⌉], of layer L: bit e % 8 of byte e // 8 is expert e's

The metadata of the file contain the facts given to `record_trace` and the states of the rules, as JSON in the key
`expert-threshold`. Gates are not stored, since the rule recomputes them from the scores, to the last bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from ..files import replacing
from ..routing import Rule, rule_from_dict, rule_to_dict
from .gpt import GPT, Output

FORMAT, VERSION = "expert-threshold trace", 1
_KEY = b"expert-threshold"
ROWS = 2**16
"""Tokens in a row group, which bounds the memory needed for writing."""


@torch.no_grad()
def record_trace(
    model: GPT,
    windows: Tensor,
    path: Path,
    *,
    facts: Mapping[str, Any] | None = None,
    batch_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Run the windows through the model, causally, and write the trace to `path` atomically.

    windows: (rows, time + 1) integers, of which the last in a row is only a target, or -1. facts: strict JSON,
    available as `Trace.facts`. batch_size: windows per forward. progress is called with the number of tokens done and
    in all. The mode of the model does not change. Raises OSError if the disk is full.
    """
    header = {"format": FORMAT, "version": VERSION, "facts": dict(facts or {}), "context": windows.shape[1] - 1}
    header |= {"rule": rule_to_dict(model.config.rule), "gate_norm": model.config.gate_norm}
    header["states"] = {
        str(layer): {name: value.tolist() for name, value in moe.router.at_rate(moe.router.rate)._asdict().items()}
        for layer, moe in model.moe_layers()
    }
    schema = _schema(header, model.config.rule)
    was_training = model.training
    model.eval()
    integers = ["token", "target", "position"]
    floats = ["loss", *(f"{field.name}.list.element" for field in schema if field.name.startswith("scores_"))]
    options: dict[str, Any] = {"compression": "zstd", "use_dictionary": integers, "use_byte_stream_split": floats}
    rows, done = max(ROWS // (windows.shape[1] - 1), 1), 0
    try:
        with replacing(path) as temporary, pq.ParquetWriter(temporary, schema, **options) as writer:
            for start in range(0, len(windows), rows):
                columns: list[dict[str, np.ndarray]] = []
                for batch in windows[start : start + rows].split(batch_size):
                    columns.append(_columns(model, batch))
                    done += batch[:, 1:].numel()
                    if progress is not None:
                        progress(done, windows[:, 1:].numel())
                writer.write_table(_table(columns, schema))
    finally:
        model.train(was_training)
    return Trace(path)


def _schema(header: Mapping[str, Any], rule: Rule | None) -> pa.Schema:
    fields = [pa.field(name, pa.int32()) for name in ("token", "target", "position")] + [pa.field("loss", pa.float32())]
    for layer in header["states"]:
        assert rule is not None
        fields += [
            pa.field(f"scores_{layer}", pa.list_(pa.float32(), rule.num_scores)),
            pa.field(f"assignment_{layer}", pa.list_(pa.uint8(), -(-rule.num_experts // 8))),
        ]
    return pa.schema(fields, {_KEY: json.dumps(header)})


def _columns(model: GPT, windows: Tensor) -> dict[str, np.ndarray]:
    """Return the columns of a batch, keyed by name, each (tokens,) or (tokens, width)."""
    device = model.embed.weight.device
    tokens, targets = windows[:, :-1].long().contiguous(), windows[:, 1:].long().contiguous()
    output: Output = model(tokens.to(device), targets.to(device), record=True)
    assert output.token_losses is not None
    assert output.routings is not None
    losses = output.token_losses.cpu().where(targets >= 0, torch.nan)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    found = {"token": tokens, "target": targets, "position": positions, "loss": losses}
    for (layer, _), routing in zip(model.moe_layers(), output.routings, strict=True):
        found[f"scores_{layer}"] = routing.scores.cpu()
        assignment = routing.assignment[..., : model.config.rule.num_experts]  # type: ignore[union-attr]
        packed = np.packbits(assignment.cpu().numpy(), axis=-1, bitorder="little")
        found[f"assignment_{layer}"] = torch.from_numpy(packed)
    return {name: values.flatten(0, 1).numpy() for name, values in found.items()}


def _table(parts: list[dict[str, np.ndarray]], schema: pa.Schema) -> pa.Table:
    arrays = []
    for field in schema:
        values = np.concatenate([part[field.name] for part in parts])
        if values.ndim == 2:
            flat = pa.array(np.ascontiguousarray(values).reshape(-1), field.type.value_type)
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, type=field.type))
        else:
            arrays.append(pa.array(values, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


class Trace:
    """A trace on disk. Columns are read on demand; one layer of a million tokens takes 64 MB."""

    def __init__(self, path: Path) -> None:
        """Open the trace. Raises ValueError if `path` is not a trace that this version can read."""
        self.path = path
        try:
            self._file = pq.ParquetFile(path)
            header = json.loads((self._file.schema_arrow.metadata or {})[_KEY])
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise ValueError(f"{path} is not a trace, or is damaged; delete it and record it again") from error
        if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"{path} is from another version of expert-threshold; delete it and record it again")
        self.facts: dict[str, Any] = header["facts"]
        self.context: int = header["context"]
        self.layers = [int(layer) for layer in header["states"]]
        self._header = header

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    @property
    def rule(self) -> Rule | None:
        """The rule of the traced model, or None if the model is dense."""
        return rule_from_dict(self._header["rule"])

    def state(self, layer: int) -> Any:
        """Return the state that the layer's rule had when the trace was recorded."""
        assert self.rule is not None
        first, saved = self.rule.init(), self._header["states"][str(layer)]
        return first._replace(**{name: torch.tensor(saved[name], dtype=v.dtype) for name, v in first._asdict().items()})

    @property
    def tokens(self) -> np.ndarray:
        """The tokens (tokens,) int32."""
        return self._column("token")

    @property
    def positions(self) -> np.ndarray:
        """The positions (tokens,) int32 in the model's window."""
        return self._column("position")

    @property
    def losses(self) -> np.ndarray:
        """The losses (tokens,) float32, in nats, which are NaN without a target."""
        return self._column("loss")

    def scores(self, layer: int) -> Tensor:
        """Return the experts' scores (tokens, experts) float32, excluding null slots and null scores."""
        return self._scores(layer)[:, : self._header["rule"]["num_experts"]]

    def assignment(self, layer: int) -> Tensor:
        """Return the assignment (tokens, experts) bool."""
        packed = self._column(f"assignment_{layer}")
        experts = self._header["rule"]["num_experts"]
        return torch.from_numpy(np.unpackbits(packed, axis=1, count=experts, bitorder="little").astype(bool))

    def gates(self, layer: int) -> Tensor:
        """Return the gates (tokens, experts) float32, which are unspecified outside the assignment."""
        assert self.rule is not None
        windows = self._scores(layer).unflatten(0, (-1, self.context))
        routing = self.rule.route(windows, self.state(layer), training=False)
        gates = routing.gates[..., : self.rule.num_experts].flatten(0, 1)
        if self._header["gate_norm"] == "fanout":
            gates = gates / self.assignment(layer).sum(-1, keepdim=True).clamp(min=1)
        return gates

    def fanout(self, layer: int) -> np.ndarray:
        """Return each token's number of routed experts, (tokens,) int64."""
        return self.assignment(layer).sum(-1).numpy()

    def _scores(self, layer: int) -> Tensor:
        return torch.from_numpy(self._column(f"scores_{layer}"))

    def _column(self, name: str) -> np.ndarray:
        try:
            column = self._file.read([name]).column(0).combine_chunks()
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.path} is damaged ({error}); delete it and record it again") from error
        if pa.types.is_fixed_size_list(column.type):
            values: np.ndarray = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
            return np.array(values)  # a writable copy, which torch needs
        return np.array(column.to_numpy())

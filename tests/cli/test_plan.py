"""`et plan` predicts the memory that the allocator counts during a run."""

from __future__ import annotations

import functools
import gc
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cases import et, said
from expert_threshold.cli.run_options import resolve_run
from expert_threshold.config import RunConfig, resolve
from expert_threshold.distributed import local_batch
from expert_threshold.kernels import cpu
from expert_threshold.model import GPT
from expert_threshold.optim import make_optimizers
from expert_threshold.plan import LAYOUTS, Machine, memory
from expert_threshold.train.device import pick_dtype
from rounding import without_kernels

GIB = 2**30


@functools.cache
def plan(*arguments: str) -> dict[str, Any]:
    """Return the JSON that `et plan` prints; no weight may be allocated, since d20's would take 10 GB."""
    with mock.patch.multiple(GPT, to_empty=None, init_weights=None):
        found: dict[str, Any] = json.loads(said("plan", *arguments, "--json"))
    return found


@pytest.mark.parametrize("is_off", [True, False])
def test_kernels_that_are_off_are_one_line_under_the_tables_and_a_field_of_the_json(
    is_off: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with without_kernels() if is_off else nullcontext():
        reason = plan.__wrapped__("tiny", "--device", "cpu", "--dtype", "bfloat16")["kernels_off"]
        assert (reason is None) == cpu.available()
        assert et("plan", "tiny", "--device", "cpu", "--dtype", "bfloat16") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("kernels are off: ") == (reason is not None)
    assert reason is None or last == reason


@pytest.fixture(autouse=True)
def buffers_of_one_thread(threads: None) -> None:
    """torch's attention has buffers for each thread, which plans leave out."""
    torch.set_num_threads(1)


def measured(config: RunConfig, dtype: torch.dtype, folder: Path) -> int:
    """The peak number of bytes allocated by torch's CPU allocator in two steps of training."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = GPT(config.model, dtype)
        model.activation_checkpointing = config.train.activation_checkpointing
        optimizers = make_optimizers(model.named_parameters(), config.optim, config.model.d_model)
        shape = (config.train.batch_size, config.model.context)
        for step in range(2):
            for _ in range(config.train.accumulation):
                tokens = torch.randint(config.model.vocab_size, shape)
                output = model(tokens, tokens)
                output.loss.backward()
                observations = output.observations
                del output
            optimizers.step(step, 100)
            model.update_rules(observations)
            optimizers.zero_grad()
    del model, optimizers, observations, tokens
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    seen = [event["args"] for event in events if event["name"] == "[memory]"]
    assert seen
    return max(e["Total Allocated"] for e in seen) - (seen[0]["Total Allocated"] - seen[0]["Bytes"])


WIDE: dict[str, Any] = {"layers": 2, "vocab_size": 512}
"""Wide enough that memory peaks in the backward pass."""
WINDOWED: dict[str, Any] = {"layers": 3, "d_model": 32, "heads": 1, "kv_heads": 1, "d_feed_forward": 32}
WINDOWED |= {"vocab_size": 64, "context": 768, "windows": "SSL", "short_window": 100}
"""In float32, the masks are a fifth of the total."""


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize(
    ("preset", "rule", "dtype", "train", "sizes"),
    [
        ("tiny", "expert_threshold", "float32", {"batch_size": 16}, {}),
        ("tiny", "dense", "auto", {"batch_size": 16}, {}),
        ("tiny", "token_choice", "auto", {"batch_size": 8, "accumulation": 2}, {}),
        ("quickstart", "expert_threshold", "auto", {"batch_size": 2}, {}),
        ("quickstart", "top_p", "auto", {"batch_size": 2}, {}),
        (
            "quickstart",
            "expert_threshold",
            "auto",
            {"batch_size": 2},
            {"dispatch": "reference", "activation": "swiglu"},
        ),
        ("quickstart", "expert_choice", "float32", {"batch_size": 4, "activation_checkpointing": True}, {}),
        ("quickstart", "dense", "auto", {"batch_size": 32}, WIDE | {"d_feed_forward": 1024}),
        ("quickstart", "expert_choice", "auto", {"batch_size": 16}, WIDE | {"d_expert": 512, "shared_experts": 3}),
        ("quickstart", "expert_choice", "auto", {"batch_size": 16}, WIDE | {"d_expert": 512, "shared_experts": 0}),
        (
            "quickstart",
            "expert_threshold",
            "auto",
            {"batch_size": 16, "activation_checkpointing": True},
            WIDE | {"d_expert": 512, "layers": 3},
        ),
        ("quickstart", "expert_threshold", "auto", {"batch_size": 16}, WIDE | {"d_expert": 500}),  # no whole tiles
        ("quickstart", "dense", "float32", {"batch_size": 1}, WINDOWED),
    ],
)
def test_the_memory_of_a_step_is_within_15_percent_of_what_the_allocator_counts(
    preset: str, rule: str, dtype: str, train: dict[str, Any], sizes: dict[str, Any], kernels: bool, tmp_path: Path
) -> None:
    in_dtype = pick_dtype(dtype, torch.device("cpu"))  # bfloat16 takes minutes where it is emulated
    if kernels and (in_dtype == torch.float32 or not cpu.available()):
        pytest.skip("no kernels compute this: it is the case of torch's operations")
    config = resolve(preset, {"rule.name": rule})
    config = replace(
        config,
        model=replace(config.model, **sizes),
        train=replace(config.train, **({"accumulation": 1} | train)),
    )
    with nullcontext() if kernels else without_kernels():
        planned = memory(config, Machine(), in_dtype, gpu=False)["replicate"]
        assert planned["peak"] == sum(bytes_ for part, bytes_ in planned.items() if part != "peak")
        assert planned["peak"] == pytest.approx(measured(config, in_dtype, tmp_path), rel=0.15)


@pytest.mark.parametrize(
    ("arguments", "peaks"),
    [
        ("d12", [160.3]),
        ("d12 --train.activation-checkpointing", [35.5]),
        ("d12 --gpus 8", [22.0, 19.6, 20.2]),
        ("d12 --gpus 8 --train.activation-checkpointing", [6.8, 4.4, 4.8]),
        ("d12 --gpus 8 --rule dense", [19.5, 18.8, 19.5]),
        ("d12 --gpus 64", [6.5, 3.8, 4.3]),
        ("d20", [241.1]),
        ("d20 --gpus 8", [49.0, 29.8, 32.9]),
        ("d20 --gpus 8 --rule dense", [30.6, 26.3, 30.6]),
        ("d20 --gpus 64", [27.0, 5.8, 9.6]),
    ],
)
def test_so_is_that_of_the_papers_models_of_a_count_without_data(arguments: str, peaks: list[float]) -> None:
    """GiB, the sum of all tensors that the operators of a step made on the meta device (November 2026)."""
    found = plan(*arguments.split())["memory"]
    assert [parts["peak"] / GIB for parts in found.values()] == pytest.approx(peaks, rel=0.15)


def test_it_names_the_backend_that_auto_chooses() -> None:
    for arguments, backend in (
        (["d12"], "static"),
        (["d12", "--gpus", "8"], "static"),  # though a pool of all ranks bounds none of them
        (["d12", "--dtype", "float32"], "grouped"),
        (["d12", "--model.dispatch", "reference"], "reference"),
        (["quickstart", "--device", "cpu"], "cpu" if cpu.available() else "grouped"),
        (["d12", "--rule", "dense"], None),
    ):
        assert plan(*arguments)["dispatch"] == backend, arguments


def test_buffers_take_more_where_they_are_sized_by_bounds() -> None:
    static, grouped = (plan("d12", "--model.dispatch", way)["memory"]["replicate"] for way in ("static", "grouped"))
    assert static["dispatch"] > 1.2 * grouped["dispatch"]


def test_a_step_of_more_gpus_costs_as_much_and_takes_less_time() -> None:
    prices = "--utilisation", "0.5", "--peak-tflops", "1000", "--price-per-gpu-hour", "2"
    one, eight = plan("d12", *prices), plan("d12", *prices, "--gpus", "8")
    assert one["flops_total"] == eight["flops_total"] == one["flops_per_token"] * one["tokens"]
    assert one["tokens"] == one["steps"] * one["tokens_per_step"]
    assert one["params_total"] == sum(one["parameters"].values())
    assert one["hours"] == pytest.approx(one["flops_total"] / 0.5e15 / 3600)
    assert one["hours"] == pytest.approx(8 * eight["hours"])
    assert one["cost"] == pytest.approx(eight["cost"]) == pytest.approx(2 * one["hours"])
    assert (eight["micro_batch"], eight["accumulation"]) == (32, 1)


def test_layouts_share_out_what_they_promise() -> None:
    told = plan("d12", "--gpus", "4")
    found = told["memory"]
    assert tuple(found) == LAYOUTS
    whole, shard, experts = (found[layout] for layout in LAYOUTS)
    assert whole["weights"] == 4 * told["params_total"]
    assert shard["weights"] == pytest.approx(whole["weights"] / 4, rel=0.001)
    routed = 4 * told["parameters"]["routed_experts"]
    assert experts["weights"] == pytest.approx(whole["weights"] - routed * 3 / 4, rel=0.001)
    assert shard["peak"] < whole["peak"]
    assert {parts["optimizer"] for parts in found.values()} == {whole["optimizer"]}
    assert whole["optimizer"] == pytest.approx(plan("d12")["memory"]["replicate"]["optimizer"] / 4, rel=0.01)
    assert list(plan("d12")["memory"]) == ["replicate"]


@pytest.mark.parametrize(
    ("arguments", "pool"),
    [
        ("tiny --rule expert_choice --gpus 8", 2 * 128),
        ("tiny --rule expert_choice --micro-batch 2", 2 * 128),
        ("tiny --rule expert_threshold --rule.pool batch --gpus 8", 2 * 128),
        ("tiny --rule expert_threshold --gpus 8", 16 * 128),
        ("tiny --rule expert_threshold --gpus 4 --micro-batch 1", 4 * 128),
        ("tiny --rule expert_choice --gpus 4 --micro-batch 1", 128),
        ("tiny --rule expert_choice --rule.pool sequence --gpus 8", 128),
        ("--recipe token_choice_aux --gpus 1", 65_536),
        ("--recipe token_choice_aux --gpus 8", 65_536),
    ],
)
def test_the_pool_is_that_of_one_of_so_many_gpus(arguments: str, pool: int) -> None:
    assert plan(*arguments.split())["pool"] == pool


def test_experts_are_split_as_the_run_says() -> None:
    def held(*arguments: str) -> int:
        """Bytes of weights on one of the GPUs that share the experts."""
        weights: int = plan("tiny", *arguments)["memory"]["expert_parallel"]["weights"]
        return weights

    sixteen = ("--gpus", "16", "--num-experts", "16")
    routed = 4 * plan("tiny", *sixteen)["parameters"]["routed_experts"]
    assert held(*sixteen, "--train.expert-parallel", "2") - held(*sixteen) == routed // 2 - routed // 16
    two, four, eight = (held("--num-experts", "4", "--gpus", gpus) for gpus in ("2", "4", "8"))
    assert two > four == eight  # no GPU holds less than one expert of a layer
    dense = plan("tiny", "--gpus", "2", "--model.dense-layers", "2", "--layers", "2")["memory"]
    assert dense["expert_parallel"] == dense["replicate"]


def test_muon_s_batch_is_no_larger_than_a_small_model() -> None:
    found = plan("tiny")
    assert found["memory"]["replicate"]["peak"] < 100 * found["params_total"]


def test_a_free_fanout_is_told_with_the_plan() -> None:
    assert "top_p has no fixed mean fanout; active parameters" in said("plan", "tiny", "--rule", "top_p")
    assert plan("tiny", "--rule", "top_p", "--rule.p", "steered")["assumed"] is None


@pytest.mark.parametrize(
    "rule", ["dense", "token_choice", "expert_choice", "expert_threshold", "expert_threshold --rule.pool batch"]
)
def test_a_gpus_micro_batch_is_that_of_training(rule: str) -> None:
    """Regression: rules whose tokens compete on a rank get whole micro-batches, which the plan split."""
    arguments = ["d12", "--rule", *rule.split(), "--batch-size", "32", "--accumulation", "4", "--gpus", "2"]
    found = plan(*arguments)
    pool = {"rule.pool": "batch"} if "--rule.pool" in rule else {}
    config = resolve("d12", {"rule.name": rule.split()[0], **pool})
    local = local_batch(32, 4, config.model.rule, 2)
    assert (found["micro_batch"], found["accumulation"]) == (local.batch_size, local.accumulation)


def test_tables_show_the_same() -> None:
    text = said("plan", "d12", "--gpus", "8")
    found = plan("d12", "--gpus", "8")
    for name in ("params_total", "params_active", "tokens", "pool"):
        assert f"{found[name]:,}" in text
    for layout in LAYOUTS:
        assert f"{found['memory'][layout]['peak'] / GIB:.2f}" in text


def test_a_files_options_of_the_rule_stay_where_a_flag_names_the_same_rule(tmp_path: Path) -> None:
    """Regression: they were dropped if neither recipe nor file named the default rule."""
    (tmp_path / "file.json").write_text('{"rule": {"decay": 0.3}}')
    for flags in ({}, {"rule.name": "expert_threshold"}):
        rule = resolve_run({"preset": "tiny", "config": str(tmp_path / "file.json")} | flags).model.rule
        assert rule.decay == 0.3


def test_a_plan_of_a_file_alone_claims_no_preset(run: Path) -> None:
    found = plan("--config", str(run / "config.json"))
    assert "preset" not in found
    assert found["config"] == str(run / "config.json")
    shown = said("plan", "--config", run / "config.json")
    assert "quickstart" not in shown
    assert "params_total" in shown  # beside a path of any length
    assert str(run / "config.json") in "".join(shown.split())


def test_a_narrow_model_has_one_head() -> None:
    """Regression: --d-model 30 was refused as heads=0, which nobody had typed."""
    assert plan("quickstart", "--d-model", "30")["steps"]
    assert resolve("quickstart", {"model.d_model": 30}).model.heads == 1

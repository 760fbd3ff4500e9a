"""Every fast path against its definition, on the card: whole models in `checks_of_models`, the rest here.

A check returns its row, with the numbers it compared, or raises AssertionError with what differs. On a CPU those that
are about CUDA are recorded as unavailable.
"""

from __future__ import annotations

import copy
import io
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cases import GPU_RULES, use_one_tile, write_text
from expert_threshold.moe import BACKENDS
from expert_threshold.moe.backends import reference
from expert_threshold.routing import RULES, Rule, kth_largest
from expert_threshold.routing.selection import _kth_largest_by_sorting
from expert_threshold.testing import make_scores, trained
from routed_sum import ASSIGNMENTS, EXPERTS, outputs_and_gradients
from routed_sum import Case as Given
from routed_sum import case as given_case

from . import ROOT, checks_of_models
from .setting import Case, NotRunError, Row, Setting, require

NAMES = ("grouped", "static", "triton")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Largest error relative to a tensor's norm. bfloat16 rounds to 2⁻⁹ a few times in turn; float32 runs without TF32."""
FEW = 1e-30
UNLIKE = 1e-3
"""The share of pairs in which the CPU's routing may differ: where rules sum or exponentiate scores, these round
differently, and a rounding may tip a comparison."""
STEPS, STOP = 8, 4


def cases(setting: Setting) -> Iterator[Case]:
    """Yield what everything else stands on first. Kernels get one tile: tuning them for toy sizes takes minutes."""
    if setting.cuda:
        with suppress(ImportError):
            use_one_tile()
    for name in NAMES:
        for dtype in TOLERANCE:
            of = f"{name} {str(dtype).removeprefix('torch.')}"
            yield Case(f"backend {of}", lambda n=name, d=dtype: backend(n, d, setting), 15)
    yield Case("selection equals sorting", lambda: selection(setting), 10)
    yield Case("routing as on the CPU", lambda: routing(setting), 10)
    yield from checks_of_models.cases(setting)
    for name, rule in list(GPU_RULES.items())[: setting.pick(None, 2)]:
        yield Case(f"resume {name}", lambda r=rule: resume(r, setting), 6)
    # Here attention adds up its gradients in several blocks.
    yield Case("resume long sequences", lambda: resume(None, setting, setting.pick(512, 64), setting.pick(256, 64)), 6)


def assignments(setting: Setting) -> dict[str, Tensor]:
    """Return the tests' assignments, and large ones whose loads are unequal, all of one number of experts, since
    kernels are compiled for each.
    """
    tokens, experts = setting.pick(4096, 24), EXPERTS
    chance = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0))
    few = torch.arange(experts) < 1
    small = {name: given for name, given in ASSIGNMENTS.items() if given.shape[1] == experts}
    small = dict(list(small.items())[: setting.pick(None, 5)])
    return {
        **small,
        "ragged": chance < torch.linspace(0.01, 0.5, experts),
        "most experts empty": (chance < 0.5) & few,
        "one expert overfull": (chance < 0.02) | (torch.arange(experts) == 3),
    }


def on(given: Given, dtype: torch.dtype, setting: Setting) -> Given:
    """Return the case on the device, with numbers that `dtype` holds exactly, so that only arithmetic rounds."""
    given = Given(*(value.to(setting.device) for value in given))
    with torch.no_grad():
        for weight in given.experts.parameters():
            weight.copy_(weight.to(dtype))
    return given._replace(x=given.x.to(dtype), upstream=given.upstream.to(dtype))


def error(found: Tensor, exact: Tensor) -> float:
    """Return ‖found − exact‖ / ‖exact‖; absolute where the exact one is zero; NaN is infinite."""
    far, size = float((found.double() - exact.double()).norm()), float(exact.double().norm())
    return (far / size if size > FEW else far) if math.isfinite(far) else math.inf


@contextmanager
def deterministic() -> Iterator[None]:
    """Algorithms are deterministic where there are such; whatever torch.empty and its like return holds NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def backend(name: str, dtype: torch.dtype, setting: Setting) -> Row:
    """Compare with float64 for every assignment and activation, in memory that holds NaN, with padding and without."""
    worst, checked = 0.0, 0
    every = assignments(setting)
    widths = setting.pick({"d_model": 256, "d_expert": 512}, {"d_model": 16, "d_expert": 32})  # whole tiles on a card
    interpreted = name == "triton" and not setting.cuda  # which is slow
    for kind in ["ragged"] if interpreted else [*every]:
        for activation in ("swiglu",) if interpreted else ("relu2", "swiglu"):
            given = on(given_case(every[kind], activation, **widths), dtype, setting)  # type: ignore[arg-type]
            if (why := BACKENDS[name].why_not(given.x, given.experts)) is not None:
                raise NotRunError(why)
            wide = given._replace(x=given.x.double(), upstream=given.upstream.double(), gates=given.gates.double())
            wide = wide._replace(experts=copy.deepcopy(given.experts).double())
            exact = outputs_and_gradients(reference, wide)
            # No rule asks for rows without a token.
            for padding in (19,) if interpreted else (0, 19) if len(given.x) else (0,):
                rows = int(given.assignment.sum()) + padding
                with deterministic():
                    found = outputs_and_gradients(partial(BACKENDS[name], rows=rows), given)
                for tensor, expected in exact.items():
                    off, where = error(found[tensor], expected), f"{kind}, {activation}, padding {padding}"
                    assert off <= TOLERANCE[dtype], f"{where}: {tensor} off by {off:.2g}"
                    worst, checked = max(worst, off), checked + 1
    return {"checked": checked, "error": worst}


def selection(setting: Setting) -> Row:
    """Compare scores and indices, for scores with no ties, with many, and all equal."""
    checked = 0
    for tokens, experts in setting.pick(((65_536, 16), (524_288, 16), (20_001, 257)), ((200, 3),)):
        scores = torch.randn(2, tokens, experts, generator=torch.Generator().manual_seed(0)).to(setting.device)
        for kind, given in (
            ("distinct", scores),
            ("tied", scores.round(decimals=1)),
            ("bfloat16", scores.bfloat16().float()),
            ("equal", torch.zeros_like(scores)),
            ("columns", scores.mT.contiguous().mT),
        ):
            ks = [tokens // experts, 0, 1, tokens // 2, tokens]
            expected = zip(*_kth_largest_by_sorting(given, ks), strict=True)
            for k, cut, (score, last) in zip(ks, kth_largest(given, ks), expected, strict=True):
                where = f"{tokens} × {experts}, {kind}, k={k}"
                assert torch.equal(cut.score, score), f"{where}: another score"
                assert torch.equal(cut.last, last), f"{where}: another token"
                checked += 2
    return {"checked": checked}


def routing(setting: Setting) -> Row:
    """Route the same scores on the device and on the CPU, in training and in inference, under every rule."""
    checked, most = 0, 0.0
    for name, cls in RULES.items():
        for case, rule in list(cls.cases().items())[:: setting.pick(1, 6)]:
            state = trained(rule)
            there = type(state)(*(tensor.to(setting.device) for tensor in state))
            for training in (True, False):
                scores = make_scores(rule)
                here = rule.route(scores, state, training=training)
                moved = rule.route(scores.to(setting.device), there, training=training)
                unlike = float((here.assignment != moved.assignment.cpu()).float().mean())
                assert unlike <= UNLIKE, f"{name}, {case}, training={training}: {unlike:.1%} of pairs differ"
                torch.testing.assert_close(moved.gates.cpu(), here.gates, rtol=1e-4, atol=1e-5)
                checked, most = checked + 1, max(most, unlike)
    return {"checked": checked, "most_different": most}


def resume(rule: Rule | None, setting: Setting, context: int = 16, d_model: int = 64) -> Row:
    """Train 8 steps; forget the last 4 in a copy, and resume it: weights, moments and states must be the same bytes.

    With torch's deterministic algorithms, since attention's backward adds up in any order on CUDA without them.
    """
    require("rustbpe", "rich")
    from rich.console import Console

    from expert_threshold.data import DataConfig
    from expert_threshold.model import GPTConfig
    from expert_threshold.optim import OptimConfig
    from expert_threshold.runs import RunFolder
    from expert_threshold.train import TrainConfig, train

    sizes = {"layers": 2, "d_model": d_model, "heads": 2, "kv_heads": 2, "d_expert": 64, "d_feed_forward": 128}
    model = GPTConfig(**sizes, vocab_size=300, context=context, rule=rule)  # type: ignore[arg-type]
    config = TrainConfig(
        steps=STEPS, batch_size=4, log_every=2, eval_every=None, checkpoint_every=STOP, device=setting.device.type,
        threads=1,
    )  # type: ignore[arg-type]  # fmt: skip
    with tempfile.TemporaryDirectory() as place, deterministic():
        folder = Path(place)
        text = write_text(folder / "text.jsonl", (ROOT / "LICENSE").read_text())
        sections = model, DataConfig(source=str(text)), OptimConfig(), config
        quiet = Console(file=io.StringIO())
        train(RunFolder.create(folder / "whole"), *sections, console=quiet)
        shutil.copytree(folder / "whole", folder / "halves")
        for checkpoint in (folder / "halves" / "checkpoints").iterdir():
            if int(checkpoint.name.removeprefix("step_")) > STOP:
                shutil.rmtree(checkpoint)
        train(RunFolder.open(folder / "halves"), *sections, console=quiet, resume=True)
        last = f"checkpoints/step_{STEPS:06}"
        whole, halves = (
            {path.name: path.read_bytes() for path in (folder / name / last).glob("*.safetensors")}
            for name in ("whole", "halves")
        )
    different = [name for name in whole if whole[name] != halves.get(name)]
    assert whole, "there is no checkpoint"
    assert not different, f"differ after resuming: {', '.join(different)}"
    return {"checked": len(whole)}


def lines(rows: dict[str, Row]) -> list[str]:
    """Return how much was checked, and the largest errors by dtype."""
    found = [f"{len(rows)} kinds of checks hold, {sum(row['checked'] for row in rows.values())} comparisons"]
    errors = [(row["error"], name) for name, row in rows.items() if row.get("error") is not None]
    if errors:
        worst, name = max(errors)
        found.append(f"largest error against float64: {worst:.2g} of the norm, {name}")
    return found

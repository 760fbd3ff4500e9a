"""Every fast path against its definition, on the card; the same bits in any company; the tests that need a card.

A check returns its row, with the numbers it compared, or raises AssertionError with what differs. On a CPU those that
are about CUDA are recorded as unavailable.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cases import GPU_RULES, model_and_batch, step, use_one_tile, write_text
from expert_threshold.moe import BACKENDS
from expert_threshold.moe.backends import reference
from expert_threshold.routing import RULES, Rule, kth_largest
from expert_threshold.routing.selection import _kth_largest_by_sorting
from expert_threshold.testing import make_scores, trained
from routed_sum import ASSIGNMENTS, EXPERTS, outputs_and_gradients
from routed_sum import Case as Given
from routed_sum import case as given_case

from . import ROOT
from .setting import Case, NotRunError, OutOfTimeError, Row, Setting, require

NAMES = ("grouped", "static", "triton")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Largest error relative to a tensor's norm. bfloat16 rounds to 2⁻⁹ a few times in turn; float32 runs without TF32."""
FEW = 1e-30
UNLIKE = 1e-3
"""The share of pairs in which the CPU's routing may differ: where rules sum or exponentiate scores, these round
differently, and a rounding may tip a comparison."""
STEPS, STOP = 8, 4

TESTS = (
    "tests/model/test_on_gpu.py",
    "tests/model/test_cross_entropy.py",
    "tests/routing/test_radix.py",
    "tests/moe/test_triton.py",
)
"""Tests that are skipped, or interpreted, where there is no card: no waiting, captured steps, our kernels."""


def cases(setting: Setting) -> Iterator[Case]:
    """Yield first the cases on which all others depend. Kernels get one tile; tuning for toy sizes takes minutes."""
    if setting.cuda:
        with suppress(ImportError):
            use_one_tile()
    for name in NAMES:
        for dtype in TOLERANCE:
            of = f"{name} {str(dtype).removeprefix('torch.')}"
            yield Case(f"backend {of}", lambda n=name, d=dtype: backend(n, d, setting), 15)
    yield Case("selection equals sorting", lambda: selection(setting), 10)
    yield Case("routing as on the CPU", lambda: routing(setting), 10)
    for name, rule in GPU_RULES.items():
        yield Case(f"cached equals full {name}", lambda r=rule: cached(r, setting), 4)
        yield Case(f"strict decoding {name}", lambda r=rule: strict(r, setting), 6)
    for name, rule in list(GPU_RULES.items())[setting.pick(0, 3) :]:
        yield Case(f"compiled equals eager {name}", lambda r=rule: compiled(r, setting), 40)
    for path in TESTS:
        yield Case(f"pytest {path}", lambda p=path: tests(p, setting), 30)
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
    from expert_threshold.train import RunConfig, TrainConfig, train

    sizes = {"layers": 2, "d_model": d_model, "heads": 2, "kv_heads": 2, "d_expert": 64, "d_feed_forward": 128}
    model = GPTConfig(**sizes, vocab_size=300, context=context, rule=rule)  # type: ignore[arg-type]
    config = TrainConfig(
        steps=STEPS, batch_size=4, log_every=2, eval_every=None, checkpoint_every=STOP, device=setting.device.type,
        threads=1,
    )  # type: ignore[arg-type]  # fmt: skip
    with tempfile.TemporaryDirectory() as place, deterministic():
        folder = Path(place)
        text = write_text(folder / "text.jsonl", (ROOT / "LICENSE").read_text())
        run = RunConfig(model, DataConfig(source=str(text)), OptimConfig(), config)
        quiet = Console(file=io.StringIO())
        train(RunFolder.create(folder / "whole"), run, console=quiet)
        shutil.copytree(folder / "whole", folder / "halves")
        for checkpoint in (folder / "halves" / "checkpoints").iterdir():
            if int(checkpoint.name.removeprefix("step_")) > STOP:
                shutil.rmtree(checkpoint)
        train(RunFolder.open(folder / "halves"), run, console=quiet, resume=True)
        last = f"checkpoints/step_{STEPS:06}"
        whole, halves = (
            {path.name: path.read_bytes() for path in (folder / name / last).glob("*.safetensors")}
            for name in ("whole", "halves")
        )
    different = [name for name in whole if whole[name] != halves.get(name)]
    assert whole, "there is no checkpoint"
    assert not different, f"differ after resuming: {', '.join(different)}"
    return {"checked": len(whole)}


def compiled(rule: Rule | None, setting: Setting) -> Row:
    """Compare loss, gradients and the rules' states of three steps, compiled as one graph and not."""
    models = [model_and_batch(rule, "auto", setting.device, torch.float32)[0] for _ in range(2)]
    kind = setting.pick("inductor", "aot_eager")
    forwards = [torch.compile(models[0], fullgraph=True, dynamic=False, backend=kind), models[1]]
    checked = 0
    for number in range(3):
        torch.manual_seed(number + 1)  # on the same batch again, some scores would lie on their cutoffs exactly
        batch = torch.randint(256, (2, 16, 64), device=setting.device).unbind()
        losses = [step(model, *batch, forward) for model, forward in zip(models, forwards, strict=True)]
        torch.testing.assert_close(*losses, msg=lambda text, n=number: f"loss of step {n}: {text}")
        for (name, fast), slow in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(
                fast.grad, slow.grad, atol=1e-4, rtol=1e-3, msg=lambda text, n=name: f"gradient of {n}: {text}"
            )
            checked += 1
        for (name, fast_state), slow_state in zip(models[0].named_buffers(), models[1].buffers(), strict=True):
            torch.testing.assert_close(fast_state, slow_state, msg=lambda text, n=name: f"state {n}: {text}")
            checked += 1
    return {"checked": checked}


@torch.no_grad()
def cached(rule: Rule | None, setting: Setting) -> Row:
    """Decode token by token, after a prompt, with the model's cache; logits must be the full forward's."""
    model, tokens, _ = model_and_batch(rule, "auto", setting.device, torch.float32)
    step_states(model, tokens)
    model.eval()
    tokens, prompt = tokens[:4, : setting.pick(64, 12)], 5
    full = model(tokens).logits
    cache = model.new_cache(len(tokens), tokens.shape[1])
    parts = [model(tokens[:, :prompt], cache=cache).logits]
    parts += [model(tokens[:, at : at + 1], cache=cache).logits for at in range(prompt, tokens.shape[1])]
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-4, rtol=1e-4)
    return {"checked": full[..., 0].numel()}


@torch.no_grad()
def step_states(model: torch.nn.Module, tokens: torch.Tensor) -> None:
    """Let the rules see some batches, so that inference sends tokens to experts."""
    for _ in range(3):
        others = torch.randint_like(tokens, 256)  # of the same tokens, one would lie on its cutoff exactly
        model.update_rules(model(others).observations)  # type: ignore[operator]


@torch.no_grad()
def strict(rule: Rule | None, setting: Setting) -> Row:
    """Decode a sequence alone and among others, strictly, in bfloat16: its logits must have the same bits."""
    require("rich", "tiktoken")
    from expert_threshold.generate.decoder import Decoder

    model, tokens, _ = model_and_batch(rule, "auto", setting.device)
    step_states(model, tokens)
    model.eval()
    count, length = setting.pick((16, 32), (3, 6))
    texts = tokens[:count, :length].tolist()

    def decode(rows: list[int]) -> torch.Tensor:
        decoder = Decoder(copy.deepcopy(model), count, length, strict=True)
        for row in rows:
            decoder.open(row)
            decoder.read(row, texts[row][:2])
        steps = [decoder.step({row: texts[row][at] for row in rows}).logits for at in range(2, length)]
        return torch.stack(steps)

    together = decode(list(range(count)))
    for row in (0, count // 2, count - 1):
        assert torch.equal(decode([row])[:, 0], together[:, row]), f"sequence {row} has other bits alone"
    return {"checked": 3 * (length - 2)}


def tests(path: str, setting: Setting) -> Row:
    """Run a file of tests that need a card, in a process of its own."""
    if not setting.cuda:
        raise NotRunError("is about CUDA")
    require("pytest", "hypothesis")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), environment.get("PYTHONPATH", "")])
    options = ["-q", "--no-header", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("pytest_timeout") is None:
        options += ["-W", "ignore::pytest.PytestConfigWarning"]  # of the option `timeout`, which it does not know
    command = [sys.executable, "-m", "pytest", *options, path]
    process: dict[str, Any] = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, **process, timeout=max(setting.left, 1), check=False)
    except subprocess.TimeoutExpired:
        raise OutOfTimeError("was stopped, its time was up; it starts again") from None
    said = done.stdout.strip().splitlines()
    failed = [line for line in said if line.startswith(("FAILED", "ERROR"))]
    assert done.returncode == 0, "; ".join(failed[:5]) or done.stdout[-300:] + done.stderr[-300:]
    return {"checked": 1, "said": said[-1]}


def lines(rows: dict[str, Row]) -> list[str]:
    """Return how much was checked, and the largest errors by dtype."""
    found = [f"{len(rows)} kinds of checks hold, {sum(row['checked'] for row in rows.values())} comparisons"]
    errors = [(row["error"], name) for name, row in rows.items() if row.get("error") is not None]
    if errors:
        worst, name = max(errors)
        found.append(f"largest error against float64: {worst:.2g} of the norm, {name}")
    return found

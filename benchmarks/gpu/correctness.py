"""Every fast path against its definition, on the card: selection and resuming here, the rest in `checks_of_*.py`.

A check returns its row, with the numbers it compared, or raises AssertionError with what differs. On a CPU those that
are about CUDA are recorded as unavailable.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from cases import GPU_RULES, use_one_tile
from expert_threshold.routing import RULES, Routing, Rule, kth_largest
from expert_threshold.routing.selection import _kth_largest_by_sorting
from expert_threshold.testing import make_scores, trained

from . import checks_of_backends, checks_of_models
from .checks_of_backends import deterministic
from .setting import Case, NotRunError, Row, Setting
from .training import toy_shards

UNLIKE = 1e-3
"""The share of pairs in which the CPU's routing may differ: where rules sum or exponentiate scores, these round
differently, and a rounding may tip a comparison."""
STEPS, STOP = 8, 4


def cases(setting: Setting) -> Iterator[Case]:
    """Yield what everything else stands on first. Kernels get one tile: tuning them for toy sizes takes minutes."""
    if setting.cuda:
        with suppress(ImportError):
            use_one_tile()
    yield from checks_of_backends.cases(setting)
    yield Case("selection equals sorting", lambda: selection(setting), 10)
    yield Case("routing as on the CPU", lambda: routing(setting), 10)
    yield from checks_of_models.cases(setting)
    for name, rule in list(GPU_RULES.items())[: setting.pick(None, 2)]:
        yield Case(f"resume {name}", lambda r=rule: resume(r, setting), 6)
    # Here attention adds up its gradients in several blocks.
    yield Case("resume long sequences", lambda: resume(None, setting, setting.pick(512, 64), setting.pick(256, 64)), 6)


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
                unlike = differences(here, moved)
                assert unlike <= UNLIKE, f"{name}, {case}, training={training}: {unlike:.1%} of pairs differ"
                torch.testing.assert_close(moved.gates.cpu(), here.gates, rtol=1e-4, atol=1e-5)
                checked, most = checked + 1, max(most, unlike)
    return {"checked": checked, "most_different": most}


def differences(here: Routing, there: Routing) -> float:
    return float((here.assignment != there.assignment.cpu()).float().mean())


def resume(rule: Rule | None, setting: Setting, context: int = 16, d_model: int = 64) -> Row:
    """Train 8 steps; forget the last 4 in a copy, and resume it: weights, moments and states must be the same bytes.

    With torch's deterministic algorithms, since attention's backward adds up in any order on CUDA without them.
    """
    try:
        import rustbpe  # noqa: F401, which trains the tokenizer
        from rich.console import Console

        from expert_threshold.data import DataConfig
        from expert_threshold.model import GPTConfig
        from expert_threshold.optim import OptimConfig
        from expert_threshold.runs import RunFolder
        from expert_threshold.train import TrainConfig, train
    except ImportError as lost:
        raise NotRunError(f"needs {lost.name}, which is not installed") from None
    sizes = {"layers": 2, "d_model": d_model, "heads": 2, "kv_heads": 2, "d_expert": 64, "d_feed_forward": 128}
    model = GPTConfig(**sizes, vocab_size=300, context=context, rule=rule)  # type: ignore[arg-type]
    config = TrainConfig(
        steps=STEPS, batch_size=4, log_every=2, eval_every=None, checkpoint_every=STOP, device=setting.device.type
    )  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as place, deterministic():
        folder = Path(place)
        corpus = toy_shards(folder / "text")
        quiet = Console(file=io.StringIO())
        sections = (model, DataConfig(source=str(corpus)), OptimConfig(), replace(config, threads=1))
        train(RunFolder.create(folder / "whole"), *sections, console=quiet)
        shutil.copytree(folder / "whole", folder / "halves")
        for checkpoint in (folder / "halves" / "checkpoints").iterdir():
            if int(checkpoint.name.removeprefix("step_")) > STOP:
                shutil.rmtree(checkpoint)
        train(RunFolder.open(folder / "halves"), *sections, console=quiet, resume=True)
        whole, halves = (bytes_of(folder / name) for name in ("whole", "halves"))
    different = [name for name in whole if whole[name] != halves.get(name)]
    assert whole, "there is no checkpoint"
    assert not different, f"differ after resuming: {', '.join(different)}"
    return {"checked": len(whole)}


def bytes_of(run: Path) -> dict[str, str]:
    """Return the sha256 of each file of tensors in a run's last checkpoint."""
    files = sorted((run / "checkpoints" / f"step_{STEPS:06}").glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def lines(rows: dict[str, Row]) -> list[str]:
    """Return how much was checked, and the largest errors by dtype."""
    found = [f"{len(rows)} kinds of checks hold, {sum(row['checked'] for row in rows.values())} comparisons"]
    errors = [(row["error"], name) for name, row in rows.items() if row.get("error") is not None]
    if errors:
        worst, name = max(errors)
        found.append(f"largest error against float64: {worst:.2g} of the norm, {name}")
    return found

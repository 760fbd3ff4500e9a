"""A run that is resumed, against one that never stopped, bit for bit."""

from __future__ import annotations

import hashlib
import io
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cases import GPU_RULES
from expert_threshold.routing import Rule

from .setting import Case, NotRunError, Row, Setting
from .toy import toy_shards

STEPS, STOP = 8, 4


def cases(setting: Setting) -> Iterator[Case]:
    """Yield a run for each rule, and one of long sequences, where attention adds up its gradients in several blocks."""
    for name, rule in list(GPU_RULES.items())[: setting.pick(None, 2)]:
        yield Case(f"resume {name}", lambda r=rule: resume(r, setting), 6)
    yield Case("resume long sequences", lambda: resume(None, setting, setting.pick(512, 64), setting.pick(256, 64)), 6)


def resume(rule: Rule | None, setting: Setting, context: int = 16, d_model: int = 64) -> Row:
    """Train 8 steps; forget the last 4 in a copy, and resume it: weights, moments and states must be the same bytes."""
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
    with tempfile.TemporaryDirectory() as place:
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

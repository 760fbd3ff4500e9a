"""The whole model: compiled steps, cached decoding, the same bits in any company, and the tests that need a card."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch

from cases import GPU_RULES, model_and_batch, step
from expert_threshold.routing import Rule

from . import ROOT
from .setting import Case, NotRunError, OutOfTimeError, Row, Setting, require

TESTS = (
    "tests/model/test_on_gpu.py",
    "tests/model/test_cross_entropy.py",
    "tests/routing/test_radix.py",
    "tests/moe/test_triton.py",
)
"""Tests that are skipped, or interpreted, where there is no card: no waiting, captured steps, our kernels."""


def cases(setting: Setting) -> Iterator[Case]:
    """Yield decoding and compiling for each rule, then the tests for a GPU."""
    for name, rule in GPU_RULES.items():
        yield Case(f"cached equals full {name}", lambda r=rule: cached(r, setting), 4)
        yield Case(f"strict decoding {name}", lambda r=rule: strict(r, setting), 6)
    for name, rule in list(GPU_RULES.items())[setting.pick(0, 3) :]:
        yield Case(f"compiled equals eager {name}", lambda r=rule: compiled(r, setting), 40)
    for path in TESTS:
        yield Case(f"pytest {path}", lambda p=path: tests(p, setting), 30)


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

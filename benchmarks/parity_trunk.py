"""Compares nanochat's trunk here with nanochat's own model: logits, loss and gradients of the same weights.

    python benchmarks/parity_trunk.py --nanochat CHECKOUT [--out docs/results/parity]

nanochat (github.com/karpathy/nanochat) is imported from the checkout and computes in float32. All weights are random,
none zero. A distance is relative to the largest of nanochat's numbers, for gradients in the same parameter. Then each
piece is taken away from this project's model by itself, and its logits must be far from nanochat's: a comparison that
would not see it proves nothing.

Ends with exit code 1 if a distance is above 1e-5, or a piece is not seen. Not part of CI.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bare import origin
from common import machine, run
from speedrun import commit_of, nanochat_model, prepare_nanochat
from torch import Tensor

from expert_threshold.model import GPT, TRUNKS, GPTConfig

NEAR, FAR = 1e-5, 1e-3
SEQUENCES = 2
PIECES = list(TRUNKS["nanochat"])
SIZES: dict[str, dict[str, Any]] = {  # windows are of 128 tokens
    "4 layers": {"layers": 4, "d_model": 128, "heads": 2, "kv_heads": 2, "vocab_size": 4096, "context": 256},
    "5 layers, grouped queries": {
        "layers": 5, "d_model": 96, "heads": 4, "kv_heads": 2, "vocab_size": 512, "context": 512
    },
}  # fmt: skip
NAMES = {  # ours to nanochat's
    r"^embed\.": "transformer.wte.",
    r"^head\.": "lm_head.",
    r"^residual_scalars$": "resid_lambdas",
    r"^skip_scalars$": "x0_lambdas",
    r"^smear_scalar$": "smear_lambda",
    r"^backout_scalar$": "backout_lambda",
    r"^blocks\.(\d+)\.attention\.value_embed\.": r"value_embeds.\1.",
    r"^blocks\.(\d+)\.attention\.value_gate\.": r"transformer.h.\1.attn.ve_gate.",
    r"^blocks\.(\d+)\.attention\.query\.": r"transformer.h.\1.attn.c_q.",
    r"^blocks\.(\d+)\.attention\.key\.": r"transformer.h.\1.attn.c_k.",
    r"^blocks\.(\d+)\.attention\.value\.": r"transformer.h.\1.attn.c_v.",
    r"^blocks\.(\d+)\.attention\.output\.": r"transformer.h.\1.attn.c_proj.",
    r"^blocks\.(\d+)\.feed_forward\.up\.": r"transformer.h.\1.mlp.c_fc.",
    r"^blocks\.(\d+)\.feed_forward\.down\.": r"transformer.h.\1.mlp.c_proj.",
}


def named_there(name: str) -> str:
    """Return nanochat's name of a parameter of ours."""
    for pattern, there in NAMES.items():
        name = re.sub(pattern, there, name)
    return name


def distance(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).abs().max() / expected.abs().max()).detach())


def randomize(model: Any) -> None:
    """Draw all weights from the seed, so that none is zero and no scalar is that of a plain trunk."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3 if weight.ndim == 1 else weight.shape[-1] ** -0.5)
        model.resid_lambdas.add_(1)


def logits_without(config: GPTConfig, weights: dict[str, Tensor], piece: str, tokens: Tensor) -> Tensor:
    """Return our logits in the trunk without one piece; its weights are left out."""
    model = GPT(replace(config, **{piece: TRUNKS["paper"][piece]}))
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    logits: Tensor = model(tokens).logits
    return logits


def compare(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the distances of logits, of the loss and of each parameter's gradient; those of logits without a piece."""
    config = GPTConfig(rule=None, d_feed_forward=4 * sizes["d_model"], **sizes, **TRUNKS["nanochat"])
    theirs: Any = nanochat_model(vars(config), seed=0)
    randomize(theirs)
    there = theirs.state_dict()
    ours: Any = GPT(config)
    weights = {name: there[named_there(name)] for name in ours.state_dict()}
    assert len(weights) == len(there), "a weight of nanochat's has no name here"
    ours.load_state_dict(weights)

    tokens, targets = torch.randint(config.vocab_size, (2, SEQUENCES, config.context))
    expected = theirs(tokens)
    mine, loss = ours(tokens, targets).loss, theirs(tokens, targets)
    mine.backward()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    found: dict[str, Any] = {
        "logits": distance(ours(tokens).logits, expected),
        "loss": distance(mine, loss),
        "gradients": {n: distance(p.grad, gradients[named_there(n)]) for n, p in ours.named_parameters()},
        "without": {piece: distance(logits_without(config, weights, piece, tokens), expected) for piece in PIECES},
    }
    near, far = [found["logits"], found["loss"], *found["gradients"].values()], found["without"].values()
    return found | {"equal": max(near) <= NEAR and min(far) >= FAR}


def to_markdown(result: dict[str, Any]) -> str:
    lines = [
        "# nanochat's trunk beside nanochat's own model",
        "",
        f"Made by `benchmarks/parity_trunk.py`, {result['date']}, commit {str(result['commit'])[:8]}, in float32 on "
        f"{result['machine']['cpu']}, torch {result['machine']['torch']}. nanochat: "
        f"{result['nanochat'] or 'commit unknown'}, `gpt.py` with the SHA-256 {result['sha256'][:16]}….",
        f"Largest distances over {SEQUENCES} random sequences, relative to the largest of nanochat's numbers, for "
        "gradients in the same parameter.",
        "",
        "| size | logits | loss | gradients, worst parameter | equal |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for name, found in result["sizes"].items():
        worst = max(found["gradients"], key=found["gradients"].get)
        cells = f"{found['logits']:.1e} | {found['loss']:.1e} | {found['gradients'][worst]:.1e}, `{worst}`"
        lines.append(f"| {name} | {cells} | {'yes' if found['equal'] else 'NO'} |")
    lines += [
        "",
        "Distances of the logits with one piece taken away here:",
        "",
        f"| size | {' | '.join(f'`{piece}`' for piece in PIECES)} |",
        f"| --- |{' ---: |' * len(PIECES)}",
    ]
    for name, found in result["sizes"].items():
        cells = " | ".join(f"{found['without'][piece]:.1g}" for piece in PIECES)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanochat", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--out", type=Path, help="folder for trunk.json and trunk.md")
    given = parser.parse_args()
    prepare_nanochat(given.nanochat, torch.float32)
    found = {name: compare(sizes) for name, sizes in SIZES.items()}
    result = {
        "nanochat": commit_of(given.nanochat),
        "sha256": hashlib.sha256((given.nanochat / "nanochat" / "gpt.py").read_bytes()).hexdigest(),
        **origin(),
        "machine": machine(),
        "sizes": found,
    }
    print(to_markdown(result))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "trunk.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (given.out / "trunk.md").write_text(to_markdown(result), encoding="utf-8")
    return int(not all(each["equal"] for each in found.values()))


if __name__ == "__main__":
    run(main)

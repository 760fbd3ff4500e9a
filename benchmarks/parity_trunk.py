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
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bare import commit_of, origin
from common import machine, run
from speedrun import nanochat_model, prepare_nanochat
from torch import Tensor

from expert_threshold.analysis.results import markdown
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
NAMES = {  # ours to nanochat's, part by part
    "embed.weight": "transformer.wte.weight", "head.weight": "lm_head.weight", "residual_scalars": "resid_lambdas",
    "skip_scalars": "x0_lambdas", "smear_scalar": "smear_lambda", "backout_scalar": "backout_lambda",
}  # fmt: skip
IN_BLOCK = {
    "attention.value_gate": "attn.ve_gate", "attention.query": "attn.c_q", "attention.key": "attn.c_k",
    "attention.value": "attn.c_v", "attention.output": "attn.c_proj", "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}  # fmt: skip


def named_there(name: str) -> str:
    """Return nanochat's name of a parameter of ours."""
    if not name.startswith("blocks."):
        return NAMES.get(name, name)
    _, block, part = name.removesuffix(".weight").split(".", 2)
    if part == "attention.value_embed":
        return f"value_embeds.{block}.weight"
    return f"transformer.h.{block}.{IN_BLOCK[part]}.weight"


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
    lines, without = [], []
    for name, found in result["sizes"].items():
        worst = max(found["gradients"], key=found["gradients"].get)
        cells = [f"{found['logits']:.1e}", f"{found['loss']:.1e}", f"{found['gradients'][worst]:.1e}, `{worst}`"]
        lines.append([name, *cells, "yes" if found["equal"] else "NO"])
        without.append([name, *(f"{found['without'][piece]:.1g}" for piece in PIECES)])
    return f"""# nanochat's trunk beside nanochat's own model

Made by `benchmarks/parity_trunk.py`, {result["date"]}, commit {str(result["commit"])[:8]}, in float32 on \
{result["machine"]["cpu"]}, torch {result["machine"]["torch"]}. nanochat: {result["nanochat"] or "commit unknown"}.
Largest distances over {SEQUENCES} random sequences, relative to the largest of nanochat's numbers, for gradients in the
same parameter.

{markdown(["size", "logits", "loss", "gradients, worst parameter", "equal"], lines)}
Distances of the logits with one piece taken away here:

{markdown(["size", *(f"`{piece}`" for piece in PIECES)], without)}"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanochat", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--out", type=Path, help="folder for trunk.json and trunk.md")
    given = parser.parse_args()
    prepare_nanochat(given.nanochat, torch.float32)
    found = {name: compare(sizes) for name, sizes in SIZES.items()}
    result = {"nanochat": commit_of(given.nanochat), **origin(), "machine": machine(), "sizes": found}
    print(to_markdown(result))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "trunk.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (given.out / "trunk.md").write_text(to_markdown(result), encoding="utf-8")
    return int(not all(each["equal"] for each in found.values()))


if __name__ == "__main__":
    run(main)

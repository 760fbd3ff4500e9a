"""Writes the model card of an exported run: its model, results and usage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..evaluation import read_results
from ..evaluation.results import RESULTS
from ..files import corrupted_file_error
from ..model import GPTConfig, parameter_counts
from ..routing import rule_name
from ..runs import RunFolder

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- mixture-of-experts
- expert-threshold
---

# {name}

{sentence}

| | |
| --- | ---: |
{rows}

Loss and bits per byte were measured on validation text that the model was not trained on.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
inputs = tokenizer("def ", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```

If the package `expert-threshold` is installed, `import expert_threshold.integrations.transformers` makes
`trust_remote_code=True` unnecessary, and `et import {name} --out RUN` turns this folder back into a run folder.
"""


def model_card(run: RunFolder, config: GPTConfig, step: int, name: str) -> str:
    """Return a model card, in Markdown, for the model of `run` at `step`, exported to a folder called `name`."""
    rule, sentence = config.rule, "A language model without routed experts."
    if rule is not None:
        sentence = (
            f"A language model with {rule.num_experts} routed experts per layer, {rule.experts_per_token:g} per token "
            f"on average, chosen by the routing rule {rule_name(rule)}: {rule.summary()}"
        )
    rows = "\n".join(f"| {label} | {value} |" for label, value in _rows(run, config, step).items())
    return CARD.format(name=name, sentence=sentence, rows=rows)


def _rows(run: RunFolder, config: GPTConfig, step: int) -> dict[str, str]:
    """Return the rows of the table about the run, keyed by label."""
    counts = parameter_counts(config)
    rows = {
        "parameters": f"{counts['total']:,}",
        "active per token": f"{counts['active']:,}",
        "layers × width": f"{config.layers} × {config.d_model}",
        "vocabulary": f"{config.vocab_size:,}",
        "context": f"{config.context:,} tokens",
    }
    with corrupted_file_error(run.path / "config.json", "restore it from a backup, or train again"):
        if "train" in run.config:
            train = run.config["train"]
            tokens = step * train["batch_size"] * train["accumulation"] * config.context
            rows["trained"] = f"{step:,} steps, {tokens:,} tokens"
    evaluated = read_results(run.path, step)
    with corrupted_file_error(run.path / RESULTS, "remove that file to export without its numbers"):
        losses, core = _losses(evaluated.get("validation") or {}), _core(evaluated.get("core", {}))
    if not losses:  # the last validation that training recorded at this step
        with corrupted_file_error(run.metrics.path, "restore it from a backup, or delete that line"):
            here = [line for line in run.metrics.read() if line["split"] == "validation" and line["step"] == step]
            losses = _losses(here[-1] if here else {})
    return rows | losses | core


def _losses(validation: Mapping[str, Any]) -> dict[str, str]:
    return {
        label: f"{validation[key]:.4f}"
        for key, label in (("loss", "validation loss, nats per token"), ("bits_per_byte", "bits per byte"))
        if validation.get(key) is not None
    }


def _core(core: Mapping[str, Any]) -> dict[str, str]:
    rows = {f"{label}, accuracy": f"{task['accuracy']:.4f}" for label, task in core.get("tasks", {}).items()}
    return rows if core.get("metric") is None else rows | {"CORE": f"{core['metric']:.4f}"}

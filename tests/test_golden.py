"""What a change of the house may not change, against tests/golden.json.

If arithmetic changes on purpose, `PYTHONPATH=tests:tests/helpers python tests/test_golden.py` rewrites it.
"""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from safetensors import safe_open

from cases import PIECES, TRAINED, et, resolved, said, small_config, small_model, write_run, write_text
from expert_threshold.config import KINDS, RUNS, RunConfig, by_path
from expert_threshold.data import DataConfig
from expert_threshold.model import GPTConfig
from expert_threshold.optim import OptimConfig
from expert_threshold.option import describe, kinds_of
from expert_threshold.recipes import RECIPES
from expert_threshold.routing import RULES, option_names, rule_from_dict
from expert_threshold.runs import RunFolder
from expert_threshold.train import TrainConfig, train

GOLDEN = Path(__file__).with_name("golden.json")
STEPS = 4
ROUNDING = 2e-3  # in a loss after STEPS; processors differ by 7e-4, since a rounded score may change an assignment


def models() -> dict[str, Any]:
    """Every rule by its defaults, each way to balance, and each piece of the trunk."""
    named = {name: rule_from_dict({"name": name, "num_experts": 4, "experts_per_token": 1}) for name in RULES}
    rules = {name: small_config(rule, layers=2) for name, rule in (named | TRAINED).items()}
    return rules | {piece: replace(small_config(layers=2), **changes) for piece, changes in PIECES.items()}


def run(folder: Path, name: str) -> RunFolder:
    """A run of STEPS steps of the model with that name, with everything that a run folder can contain."""
    made = RunFolder.create(folder / name)
    every = {"log_every": 2, "eval_every": 2, "eval_tokens": 512, "checkpoint_every": 2, "sample_every": 4}
    config = TrainConfig(steps=STEPS, batch_size=4, accumulation=2, threads=1, dtype="float32", **every)
    data = DataConfig(source=str(write_text(folder / "corpus.jsonl")))
    optim = OptimConfig(adamw_warmup_steps=1, momentum_warmup_steps=1)
    train(made, RunConfig(replace(models()[name], context=16), data, optim, config), sample=lambda *_: "text")
    return made


def losses(folder: Path, name: str) -> list[float]:
    """The training loss and the validation loss at the end."""
    last = {record["split"]: record["loss"] for record in run(folder, name).metrics.read() if "loss" in record}
    return [round(last["train"], 5), round(last["validation"], 5)]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def folders(folder: Path) -> dict[str, Any]:
    """The files of a run, and files, keys and tensors of its export."""
    made = run(folder, "expert_threshold")
    export = folder / "exported"
    assert et("export", write_run(folder / "small", small_model()).path, "--to", export) == 0
    with safe_open(export / "model.safetensors", "pt") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in sorted(tensors.keys())}
    return {
        "run": files(made.path),
        "export": files(export),
        "export's config": sorted(json.loads((export / "config.json").read_text())),
        "export's tensors": shapes,
    }


def comparison(folder: Path) -> dict[str, list[float]]:
    """The table of two methods and two seeds."""
    sizes = ["--steps", 4, "--batch-size", 4, "--context", 16, "--vocab-size", 270, "--threads", 1]
    data = write_text(folder / "corpus.jsonl")
    out = folder / "compared"
    methods = ["--rules", "dense,expert_threshold", "--seeds", 2]
    assert et("compare", "tiny", *methods, *sizes, "--dtype", "float32", "--data", data, "--out", out) == 0
    with (out / "compare.csv").open() as file:
        columns = ("loss", "loss_std", "bits_per_byte", "load_spread", "fanout_mean")
        return {row["method"]: [round(float(row[c] or 0), 4) for c in columns] for row in csv.DictReader(file)}


DEFAULTS = by_path(RunConfig(GPTConfig(), DataConfig(), OptimConfig(), TrainConfig()).to_dict())


def plan(arguments: list[str]) -> dict[str, Any]:
    """Sizes, length and pools of a run, and its options that are not at their defaults."""
    found = json.loads(said("plan", *arguments, "--json"))
    options = by_path(resolved(" ".join(arguments)).to_dict())
    changed = {path: value for path, value in options.items() if value != DEFAULTS.get(path)}
    names = ("params_total", "params_active", "flops_per_token", "steps", "tokens", "pool", "effective_pool")
    return {name: found[name] for name in names} | {"options": json.loads(json.dumps(changed))}


def types() -> dict[str, str]:
    """The type of every option, with its bounds, in words."""
    found = {path: describe(kind) for path, kind in KINDS.items()}
    for rule, cls in RULES.items():
        found |= {f"{rule}.{name}": describe(kinds_of(cls)[name]) for name in option_names(rule)}
    return found


PLANS = {name: [name] for name in RUNS} | {name: ["--recipe", name] for name in RECIPES}


def golden(section: str) -> Any:
    return json.loads(GOLDEN.read_text())[section]


@pytest.mark.parametrize("name", models())
def test_a_short_run_ends_with_the_losses_it_had(name: str, tmp_path: Path) -> None:
    assert losses(tmp_path, name) == pytest.approx(golden("losses")[name], abs=ROUNDING)


@pytest.mark.parametrize("name", PLANS)
def test_every_preset_and_recipe_has_the_options_and_the_size_it_had(name: str) -> None:
    assert plan(PLANS[name]) == golden("plans")[name]


def test_every_option_has_the_type_it_had() -> None:
    assert types() == golden("types")


def test_runs_and_exports_contain_the_files_and_tensors_they_had(tmp_path: Path) -> None:
    assert folders(tmp_path) == golden("folders")


def test_a_comparison_has_the_table_it_had(tmp_path: Path) -> None:
    found, before = comparison(tmp_path), golden("comparison")
    assert found.keys() == before.keys()
    for method, row in found.items():
        assert row[:-2] == pytest.approx(before[method][:-2], abs=ROUNDING)
        assert row[-2:] == pytest.approx(before[method][-2:], rel=0.02)  # loads and fanout


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        sections = [Path(temporary) / section for section in ("losses", "folders", "comparison")]
        for section in sections:
            section.mkdir()
        record: dict[str, Any] = {
            "losses": {model: losses(sections[0], model) for model in models()},
            "plans": {name: plan(arguments) for name, arguments in PLANS.items()},
            "types": types(),
            "folders": folders(sections[1]),
            "comparison": comparison(sections[2]),
        }
    lines = {
        n: ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in part.items()) for n, part in record.items()
    }
    GOLDEN.write_text("{\n" + ",\n".join(f" {json.dumps(n)}: {{\n{part}\n }}" for n, part in lines.items()) + "\n}\n")

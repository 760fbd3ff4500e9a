"""`et calibrate`: new cutoffs for a model with or without cutoffs, from text and without training."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import RULES, et, said, small_model
from commands import Refused, content, edit, read
from expert_threshold.data import open_source, pack
from expert_threshold.evaluation import evaluate
from expert_threshold.model.calibrate import calibrate
from expert_threshold.routing import ExpertChoice
from expert_threshold.routing.cutoffs import sketch
from expert_threshold.runs import RunFolder, load_model

BY_CUTOFF = ("expert_choice", "expert_threshold")


def tokens_of(seed: int) -> torch.Tensor:
    return torch.randint(270, (8, 64), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", BY_CUTOFF)
def test_cutoffs_are_the_mean_of_the_pools_k_th_largest_scores(name: str) -> None:
    model = small_model(RULES[name])
    weights = {n: value.clone() for n, value in model.named_parameters()}
    steps = [int(moe.router.state.step) for _, moe in model.moe_layers()]
    batches = [tokens_of(1), tokens_of(2)]
    calibrate(model, ((tokens, tokens) for tokens in batches), experts_per_token=2)
    assert not model.training
    assert [moe.router.rule for _, moe in model.moe_layers()] == [RULES[name]] * 2
    assert all(torch.equal(weights[n], value) for n, value in model.named_parameters())
    assert [int(moe.router.state.step) for _, moe in model.moe_layers()] == steps
    scores = [model(tokens, record=True).routings[0].scores.flatten(0, 1) for tokens in batches]  # nothing routed below
    kth = [s.sort(0, descending=True).values[8 * 64 * 2 // 4 - 1] for s in scores]
    router = model.moe_layers()[0][1].router
    torch.testing.assert_close(router.thresholds(), (kth[0] + kth[1]) / 2)
    torch.testing.assert_close(router.state.sketch, (sketch(scores[0]) + sketch(scores[1])) / 2)


@pytest.mark.parametrize("name", BY_CUTOFF)
def test_deeper_cutoffs_are_measured_with_the_rules_own_gates(name: str) -> None:
    """Regression: they were measured with sigmoid gates."""
    options = {"gate": "softmax", "null_scores": 2}
    model, tokens = small_model(replace(RULES[name], **options)), tokens_of(1)
    calibrate(model, [(tokens, tokens)])
    measured = model.moe_layers()[1][1].router.thresholds()
    for _, moe in model.moe_layers():
        moe.router.rule = ExpertChoice(4, moe.router.rule.experts_per_token, pool="batch", **options)
    with torch.no_grad():
        scores = model.train()(tokens, tokens, record=True).routings[1].scores[..., :4].flatten(0, 1)
    k = int(len(scores) * model.config.rule.experts_per_token / 4)
    torch.testing.assert_close(measured, scores.sort(0, descending=True).values[k - 1])


@pytest.mark.parametrize(("name", "rate"), [("expert_choice", 1), ("expert_threshold", 1), ("expert_choice", 2.5)])
def test_calibration_adds_cutoffs_for_a_rate_and_leaves_the_trained_run_unchanged(
    name: str, rate: float, made: Path, tmp_path: Path
) -> None:
    before = content(made / name)
    out, again = tmp_path / "new", tmp_path / "again"
    options = ["--tokens", 4096, "--batch-size", 16, "--experts-per-token", rate, "--dtype", "float32"]
    printed = said("calibrate", made / name, "--to", out, *options)
    assert content(made / name) == before
    facts = read(out / "calibration.json")
    model, tokenizer = load_model(out)
    assert model.config.rule.experts_per_token == rate
    tokens = pack(open_source(str(made / "corpus.jsonl")), tokenizer, "validation")
    found = evaluate(model, tokens, tokenizer)
    old = evaluate(load_model(made / name)[0], tokens, tokenizer)
    assert facts["losses"]["cutoffs before"]["loss"] == pytest.approx(old.loss, rel=1e-5)
    assert facts["losses"]["cutoffs after"]["loss"] == pytest.approx(found.loss, rel=1e-5)
    assert ("training pools" in facts["losses"]) == (name == "expert_choice")
    assert f"{found.loss:.4f}" in printed
    assert all(float(seen.fanout_mean) == pytest.approx(rate, abs=0.4) for seen in found.observations)
    model.set_rate(2)
    assert et("calibrate", made / name, "--to", again, *options) == 0
    paths = (out, again, made / name)
    saved, repeated, source = (RunFolder.open(path).load_checkpoint(4).tensors["model"] for path in paths)
    assert all(torch.equal(repeated[key], value) for key, value in saved.items())
    changed = {key for key, value in saved.items() if not torch.equal(value, source[key])}
    assert changed
    assert all(".router.state_" in key for key in changed)
    assert not any(path.name.startswith(".tmp-") for path in tmp_path.iterdir())


@pytest.fixture
def untold(made: Path, tmp_path: Path) -> Path:
    """A run that records no training, like an imported one."""
    run = Path(shutil.copytree(made / "expert_choice", tmp_path / "run"))
    with edit(run / "config.json") as config:
        for section in ("data", "train", "corpus"):
            del config[section]
    return run


@pytest.mark.parametrize("command", ["calibrate", "evaluate"])
def test_a_model_that_records_no_training_is_measured_on_a_text_that_is_named_without_training_pools(
    command: str, untold: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a model built in transformers and imported was refused as damaged."""
    options: list[Any] = ["--to", tmp_path / "new", "--tokens", 1024, "--batch-size", 8]
    options = options if command == "calibrate" else ["--no-validation"]
    assert et(command, untold, *options) == 2
    assert et(command, untold, *options, "--data", made / "corpus.jsonl") == 0
    printed = capsys.readouterr()
    assert "by training pools" not in printed.out
    assert command == "calibrate" or "not by training pools" in printed.err


def test_without_a_batch_there_is_nothing_to_measure() -> None:
    model = small_model()
    cutoffs = model.moe_layers()[0][1].router.thresholds()
    with pytest.raises(ValueError, match="no text to calibrate on"):
        calibrate(model, [])
    assert torch.equal(model.moe_layers()[0][1].router.thresholds(), cutoffs)
    with pytest.raises(ValueError, match="k = ⌊2 · 1 / 4⌋ = 0"):
        calibrate(model, [(tokens_of(0)[:1, :2], tokens_of(0)[:1, :2])])
    assert isinstance(model.moe_layers()[0][1].router.rule, type(RULES["expert_threshold"]))
    assert not model.training


def test_a_run_without_a_layer_of_experts_is_refused(untold: Path, refused: Refused, tmp_path: Path) -> None:
    """Regression: the run was calibrated before the mean over no layers failed."""
    with edit(untold / "config.json") as config:
        config["model"]["dense_layers"] = config["model"]["layers"]
    refused(["calibrate", untold, "--to", tmp_path / "new"], f"et calibrate: {untold} has no experts")
    refused(["evaluate", untold, "--rates", 1], f"--rates 1: {untold} has no experts")


def test_scores_that_are_not_finite_are_refused_by_layer_and_expert() -> None:
    """A cutoff of NaN sends no token to its expert, whatever it learns later."""
    model = small_model()
    layer, moe = model.moe_layers()[-1]
    before = moe.router.thresholds()
    moe.router.weight.data[1] = torch.nan
    with pytest.raises(ValueError, match=f"the scores of expert 1 in layer {layer} are not finite; calibrate"):
        calibrate(model, [(tokens_of(0), tokens_of(0))])
    assert torch.equal(moe.router.thresholds(), before)

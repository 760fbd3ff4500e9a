"""Rates of a whole model and of single requests in a batch, and models without rates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases import RULES, small_model, small_tokenizer, write_run
from commands import Refused
from expert_threshold.cli import main
from expert_threshold.generate import generate
from expert_threshold.generate.engine import ActiveRequest, Engine, Request

from .test_batching import run

PROMPT = (1, 40, 41, 42, 43)
BY_CUTOFF = ("expert_choice", "expert_threshold")


def tokens_of(rows: int) -> Tensor:
    return torch.randint(270, (rows, 64), generator=torch.Generator().manual_seed(5))


def routed(writing: ActiveRequest) -> float:
    steps = [step for step in writing.steps if step.routing]
    return sum(len(layer.experts) for step in steps for layer in step.routing or ()) / len(steps)


@pytest.mark.parametrize("rule", BY_CUTOFF)
def test_a_model_is_set_to_a_rate_and_back(rule: str) -> None:
    model, tokens = small_model(RULES[rule]), tokens_of(16)
    trained = model(tokens).logits
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for rate, low, high in ((0, 0, 0), (0.5, 0.3, 0.75), (2, 1.6, 2.4), (4, 4, 4)):
        model.set_rate(rate)
        assert all(low <= seen.fanout_mean <= high for seen in model(tokens).observations), rate
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    model.set_rate(None)
    assert torch.equal(model(tokens).logits, trained)


def test_a_rate_does_not_reach_training() -> None:
    model, tokens = small_model(), tokens_of(4)
    model.train()
    expected = model(tokens).logits
    model.set_rate(0)
    assert torch.equal(model(tokens).logits, expected)


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("rule", BY_CUTOFF)
def test_requests_at_different_rates_share_a_batch_with_the_results_of_each_alone(rule: str) -> None:
    model = small_model(RULES[rule])
    rates = (None, 0, 0.5, 2, 4)
    requests = [Request(PROMPT, 12, 0.0, record=True, echo=True, rate=rate) for rate in rates]
    found = run(Engine(model, small_tokenizer(), slots=len(rates), strict=True), requests)
    for writing, request in zip(found, requests, strict=True):
        model.set_rate(request.rate)
        (alone,) = run(Engine(model, small_tokenizer(), slots=1, strict=True), [request._replace(rate=None)])
        assert writing.steps == alone.steps
    model.set_rate(None)
    fanouts = [routed(writing) for writing in found[1:]]
    assert fanouts[0] == 0 < fanouts[1] < fanouts[2] < fanouts[3] == 4 * 2  # experts in each of two layers


def test_a_row_takes_the_rate_of_the_request_that_it_serves_now() -> None:
    model = small_model()
    requests = [Request(PROMPT, 6, 0.0, record=True, rate=rate) for rate in (0, None)]
    first, second = run(Engine(model, small_tokenizer(), slots=1), requests)
    assert routed(first) == 0
    steps = list(generate(model, small_tokenizer(), PROMPT, max_tokens=6, temperature=0, record=True))
    assert second.steps == steps


REFUSED = [
    ("expert_threshold", -1, "rate=-1 must be between 0 and num_experts=4"),
    ("expert_choice", 5, "rate=5 must be between 0 and num_experts=4"),
    ("token_choice", 1, "rate=1 needs cutoffs, which TC does not have"),
    ("dense", 1, "rate=1 requires experts, but this model is dense"),
]


@pytest.mark.parametrize(("rule", "rate", "message"), REFUSED)
def test_what_has_no_such_rate_is_refused_everywhere(
    rule: str, rate: float, message: str, tmp_path: Path, refused: Refused
) -> None:
    model = small_model(RULES[rule])
    with pytest.raises(ValueError, match=message):
        model.set_rate(rate)
    assert all(moe.router.rate is None for _, moe in model.moe_layers())
    with pytest.raises(ValueError, match=message):
        Engine(model, small_tokenizer()).add(Request(PROMPT, 4, rate=rate))
    write_run(tmp_path / "run", model)
    refused(["generate", tmp_path / "run", f"--rate={rate}"], message.replace(f"rate={rate}", f"rate={float(rate)}"))


def test_generate_takes_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    write_run(tmp_path / "run", model)
    texts = []
    for rate in ("none", "0", "4"):
        options = ["--temperature", "0", "--max-tokens", "20", "--dtype", "float32", "--rate", rate]
        assert main(["generate", str(tmp_path / "run"), *options]) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 3
    alone = generate(model, small_tokenizer(), "", max_tokens=20, temperature=0, rate=4)
    assert texts[2] == "".join(step.text for step in alone) + "\n"

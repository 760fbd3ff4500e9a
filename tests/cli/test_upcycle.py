"""`et upcycle`: a dense run becomes the start of a Mixture-of-Experts run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cases import et, small_model, write_text
from commands import content, lines
from expert_threshold.model import GPT, GPTConfig
from expert_threshold.model.upcycle import upcycle, upcycled_config
from expert_threshold.routing import ExpertChoice, ExpertThreshold, NullSlots, Rule, TokenChoice
from expert_threshold.runs import load_model

RULES: dict[str, Rule] = {
    "token_choice": TokenChoice(4, 2),
    "expert_choice": ExpertChoice(4, 1),
    "expert_threshold": ExpertThreshold(4, 1.5, warmup_steps=2),
}
TOKENS = torch.randint(270, (4, 64), generator=torch.Generator().manual_seed(3))


def dense(**changes: object) -> GPT:
    return small_model(None, **changes)


def made_of(model: GPT, rule: Rule, *, seed: int = 0, **options: int) -> GPT:
    return upcycle(model, upcycled_config(model.config, rule, **options), torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_upcycled_model_computes_the_same_as_the_dense_one(rule: Rule, training: bool, activation: str) -> None:
    before = dense(activation=activation).train(training)
    after = made_of(before, rule)
    assert after.training == training
    assert len(after.moe_layers()) == 2
    routed = after(TOKENS).observations
    torch.testing.assert_close(after(TOKENS).logits, before(TOKENS).logits, rtol=1e-5, atol=1e-5)
    if training:
        assert all(observation.load.sum() > 0 for observation in routed)


@pytest.mark.parametrize("rate", [0, 1, 4])
def test_it_does_so_at_every_rate(rate: float) -> None:
    before = dense()
    after = made_of(before, RULES["expert_threshold"])
    after.train()
    after.update_rules(after(TOKENS).observations)
    after.eval().set_rate(rate)
    torch.testing.assert_close(after(TOKENS).logits, before(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_experts_start_with_different_dense_units_and_zero_output() -> None:
    before = dense(activation="swiglu")
    after = made_of(before, RULES["expert_threshold"])
    again, other = made_of(before, RULES["expert_threshold"]), made_of(before, RULES["expert_threshold"], seed=1)
    for layer, moe in after.moe_layers():
        feed_forward = before.blocks[layer].feed_forward
        rows = {tuple(row.tolist()): i for i, row in enumerate(feed_forward.up.weight)}
        units = [[rows[tuple(row.tolist())] for row in expert] for expert in moe.experts.up]
        assert len({tuple(sorted(each)) for each in units}) == 4
        for expert, each in enumerate(units):
            assert torch.equal(moe.experts.gate[expert], feed_forward.gate.weight[each])
        assert not moe.experts.down.any()
        assert torch.equal(moe.experts.up, again.blocks[layer].moe.experts.up)
        assert not torch.equal(moe.experts.up, other.blocks[layer].moe.experts.up)


def test_experts_learn_at_once() -> None:
    after = made_of(dense(), RULES["expert_threshold"]).train()
    after(TOKENS, TOKENS.roll(-1, 1)).loss.backward()
    for _, moe in after.moe_layers():
        assert moe.experts.down.grad.abs().amax((1, 2)).min() > 0


def test_weights_that_are_not_finite_are_refused() -> None:
    model = dense()
    model.blocks[1].feed_forward.up.weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"weight blocks\.1\.feed_forward\.up\.weight is not finite; upcycle"):
        made_of(model, RULES["expert_choice"])


def test_widths_that_do_not_go_up_and_models_with_experts_are_refused() -> None:
    config = dense().config
    with pytest.raises(ValueError, match="d_expert=24 must divide d_feed_forward=64"):
        upcycled_config(config, RULES["expert_choice"], d_expert=24)
    with pytest.raises(ValueError, match="dense_layers=3 must be at least 0 and less than layers=3"):
        upcycled_config(config, RULES["expert_choice"], dense_layers=3)
    with pytest.raises(ValueError, match="already has experts"):
        upcycled_config(small_model().config, RULES["expert_choice"])
    with pytest.raises(ValueError, match=r"NullSlots.*null='copy'.* adds a multiple of each token"):
        upcycled_config(config, NullSlots(4, null="copy"))
    assert upcycled_config(config, RULES["expert_choice"], dense_layers=0).shared_experts == 4
    assert GPTConfig.from_dict(upcycled_config(config, RULES["expert_choice"]).to_dict()).d_expert == 16


def test_a_dense_run_is_upcycled_and_trained_on(tmp_path: Path) -> None:
    text = write_text(tmp_path / "corpus.jsonl")
    small = ["--data", text, "--batch-size", 4, "--threads", 1, "--dtype", "float32", "--eval-every", "none"]
    sizes = ["--vocab-size", 270, "--context", 64]
    dense_run, start, moe_run = (tmp_path / name for name in ("dense", "start", "moe"))
    assert et("train", "tiny", *small, *sizes, "--rule", "dense", "--steps", 6, "--out", dense_run) == 0
    before = content(dense_run)
    assert et("upcycle", dense_run, "--to", start, "--num-experts", 4) == 0
    assert content(dense_run) == before
    tokens = TOKENS[:, :64]
    old, new = (load_model(run)[0] for run in (dense_run, start))
    torch.testing.assert_close(new(tokens).logits, old(tokens).logits, rtol=1e-5, atol=1e-5)
    assert et("train", "tiny", "--init-from", start, *small, "--steps", 6, "--log-every", 1, "--out", moe_run) == 0
    first, second = (lines(run / "metrics.jsonl")[0]["loss"] for run in (dense_run, moe_run))
    assert second < first  # it keeps what the dense run learned
    trained = load_model(moe_run)[0]
    assert all(moe.experts.down.any() for _, moe in trained.moe_layers())
    trained.set_rate(2)

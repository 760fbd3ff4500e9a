"""Our rules in the mixtures of transformers."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from mixtures import MIXTURES, mixture

transformers = pytest.importorskip("transformers")

from expert_threshold.integrations.swap import SwappedRouter, own_rule  # noqa: E402
from expert_threshold.integrations.transformers import swap_rule  # noqa: E402
from expert_threshold.moe import follow  # noqa: E402
from expert_threshold.routing import ExpertChoice, ExpertThreshold, NullSlots, Rule, SeqTopK, TokenChoice  # noqa: E402

mixtures = pytest.mark.parametrize("name", [*MIXTURES, "Olmoe, normalised", "Qwen3Moe, normalised"])
THRESHOLD = ExpertThreshold(8, 2, decay=0.5, warmup_steps=2)


def tokens(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(1, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def routers(model: Any) -> list[SwappedRouter]:
    return [module for module in model.modules() if isinstance(module, SwappedRouter)]


def trained(model: Any, steps: int = 4, **inputs: Any) -> Any:
    """The model after a few steps that follow the rule."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    follow(model, optimizer)
    for _ in range(steps):
        model(tokens(), labels=tokens(), **inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@mixtures
@torch.no_grad()
def test_with_its_own_rule_a_mixture_computes_what_it_did(name: str) -> None:
    model = mixture(name)
    before = model(tokens()).logits
    assert routers(swap_rule(model, own_rule(model)))
    torch.testing.assert_close(model(tokens()).logits, before)
    assert type(own_rule(model)) is TokenChoice


@mixtures
def test_another_rule_trains_saves_loads_and_generates_with_a_cache(name: str, tmp_path: Path) -> None:
    model = mixture(name)
    first = {key: value.clone() for key, value in model.state_dict().items()}
    trained(swap_rule(model, THRESHOLD))
    for router in routers(model):
        assert router.state.step == 4
        assert router.state.mean.abs().min() > 0
    assert set(first) <= set(model.state_dict()) | {key for key in first if key.endswith("e_score_correction_bias")}
    model.save_pretrained(tmp_path)
    again = swap_rule(type(model).from_pretrained(tmp_path).eval())
    with torch.no_grad():
        torch.testing.assert_close(again(tokens()).logits, model(tokens()).logits)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    written = model.generate(tokens(), **options)
    assert written.tolist() == model.generate(tokens(), use_cache=False, **options).tolist()


@mixtures
@torch.no_grad()
def test_padding_on_the_left_changes_no_real_token(name: str) -> None:
    model = swap_rule(mixture(name), TokenChoice(8, 2))
    padded = torch.cat((torch.zeros(2, 5, dtype=torch.long), tokens()), 1)
    mask = (padded > 0).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = model(padded, attention_mask=mask, position_ids=positions).logits[:, 5:]
    torch.testing.assert_close(found, model(tokens()).logits, rtol=1e-4, atol=1e-4)


FOLLOWED = [THRESHOLD, ExpertChoice(8, 2, pool="batch"), TokenChoice(8, 2, balance="aux")]


@pytest.mark.parametrize("rule", FOLLOWED, ids=str)
def test_padding_takes_part_in_no_statistics(rule: Rule) -> None:
    model = swap_rule(mixture(), rule).train()
    found: list[Any] = []
    first = routers(model)[0]
    first.register_forward_hook(lambda _m, _i, routing: found.append(routing.observation))
    row = tokens(1)
    model(row)
    model(torch.cat((row, torch.zeros_like(row)), 1), attention_mask=torch.arange(24)[None] < 12)
    alone, padded = found
    torch.testing.assert_close(padded.tensors(), alone.tensors())


@pytest.mark.parametrize(("kind", "name"), [("target_modules", "q_proj"), ("target_parameters", "experts.down_proj")])
def test_adapters_train_while_the_rule_follows(kind: str, name: str) -> None:
    peft = pytest.importorskip("peft")
    model = swap_rule(mixture(), THRESHOLD)
    with warnings.catch_warnings():  # peft reads a property that transformers renames
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, **{kind: [name]}))
    trained(adapted)
    assert all(router.state.step == 4 for router in routers(adapted))
    changed = [name for name, parameter in adapted.named_parameters() if "lora_B" in name and parameter.any()]
    assert len(changed) == 2  # one a layer


def test_a_copy_has_routers_and_padding_of_its_own() -> None:
    model = swap_rule(mixture("Mixtral"), THRESHOLD)
    other = copy.deepcopy(model)
    other(tokens(3))
    assert routers(other)[0].inputs.rows == (3, 12)
    assert routers(model)[0].inputs is None


@torch.no_grad()
def test_swapped_back_a_mixture_computes_what_it_did() -> None:
    model = mixture("DeepseekV3")
    before, own = model(tokens()).logits, own_rule(model)
    swap_rule(model, THRESHOLD)(tokens())
    torch.testing.assert_close(swap_rule(model, own)(tokens()).logits, before)


def test_biases_trained_by_the_own_rule_are_saved_under_the_models_name_for_them(tmp_path: Path) -> None:
    model = mixture("DeepseekV3")
    trained(swap_rule(model, own_rule(model))).save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens()).logits, model(tokens()).logits)


def test_a_rule_that_the_model_has_keeps_its_state_and_its_follower(tmp_path: Path) -> None:
    model = trained(swap_rule(mixture(), THRESHOLD))
    for again in (swap_rule(model), swap_rule(model, THRESHOLD)):
        assert [router.state.step for router in routers(again)] == [4, 4]
    model.name_or_path = str(tmp_path)  # a folder without states
    for layer in model.model.layers:
        layer.mlp.gate.rule = ExpertChoice(8, 1)
    with pytest.raises(ValueError, match="states for 0 routers"):
        swap_rule(model)


@pytest.mark.parametrize("lengths", [(12, 12), (12, 7)])
def test_under_activation_checkpointing_gradients_stay_or_an_error_says_why(lengths: tuple[int, int]) -> None:
    model = swap_rule(mixture(), TokenChoice(8, 2, balance="aux")).train()

    def gradient(forwards: int) -> torch.Tensor:
        model.zero_grad()
        losses = [model(tokens(length=length), labels=tokens(length=length)).loss for length in lengths[:forwards]]
        sum(losses).backward()
        return model.model.layers[0].mlp.experts.down_proj.grad.clone()

    plain = [gradient(1), gradient(2)]
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    with torch.no_grad():
        model(tokens(length=5))
    torch.testing.assert_close(gradient(1), plain[0])
    if lengths[0] == lengths[1]:
        torch.testing.assert_close(gradient(2), plain[1])
    else:
        with pytest.raises(ValueError, match="activation checkpointing"):
            gradient(2)


def test_what_does_not_fit_is_refused_and_left_alone() -> None:
    olmoe = mixture()
    dense = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1))
    for model, rule, words in (
        (olmoe, ExpertThreshold(4, 1), "num_experts=4"),
        (olmoe, "expert_threshold", "rule='expert_threshold'"),
        (olmoe, None, "no rule"),
        (torch.nn.Linear(2, 2), THRESHOLD, "Linear"),
        (torch.nn.Sequential(olmoe), THRESHOLD, "no configuration"),
        (olmoe, ExpertThreshold(8, 2, gate="softmax", null_scores=2), "more scores than"),
        (olmoe, SeqTopK(8, 2), "SeqTopK"),
        (olmoe, NullSlots(8, 1, null="copy"), "NullSlots"),
        (dense, THRESHOLD, "GPT2"),
    ):
        with pytest.raises(ValueError, match=words):
            swap_rule(model, rule)  # type: ignore[arg-type]
        assert not routers(model)

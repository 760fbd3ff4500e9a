"""An audit catches what is planted, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import RULES, TEXT, small_model, small_tokenizer
from expert_threshold.analysis import causality
from expert_threshold.analysis.audit import Audit, audit, measure
from expert_threshold.analysis.audit_page import audit_page
from expert_threshold.routing import ExpertChoice, ExpertThreshold
from mixtures import MIXTURES, mixture, random_model

pytest.importorskip("transformers")

from expert_threshold.integrations.transformers import swap_rule

DENSE: dict[str, dict[str, Any]] = {
    "Llama": {}, "Mistral": {"sliding_window": 7}, "Qwen2": {}, "Qwen3": {}, "Gemma": {},
    "Gemma2": {"sliding_window": 7}, "Phi": {}, "Olmo2": {}, "GPT2": {}, "GPTNeoX": {}, "OPT": {"ffn_dim": 48},
    "Bloom": {}, "Falcon": {}, "StableLm": {}, "Cohere": {}, "Granite": {},
}  # fmt: skip


class Letters:
    """Encodes a text into 64 ids."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 64 for letter in text]


def audited(model: nn.Module, **options: Any) -> Audit:
    return audit(model, Letters(), {"cats": [TEXT * 9], "code": [str(list(range(99)))]}, tokens=400, **options)


def leaks(found: Audit) -> set[str]:
    return {check.what for check in found.checks if check.changed}


def judged(found: Audit) -> set[str]:
    return {check.what for check in found.checks if check.positions}


ALL = {"later tokens", "neighbours", "padding", "chunks"}


@pytest.mark.parametrize("name", MIXTURES)
def test_the_mixtures_of_transformers_are_causal_and_their_loads_are_seen(name: str) -> None:
    found = audited(mixture(name))
    assert not leaks(found), found.verdict
    assert judged(found) == ALL
    assert found.dtype == "float64"
    for layer in found.layers:
        assert layer.fanout == 2
        assert {text: sum(load) for text, load in layer.load.items()} == {"cats": 400, "code": 400}


@pytest.mark.parametrize("name", RULES)
def test_our_models_are_causal(name: str) -> None:
    found = audit(small_model(RULES[name]), small_tokenizer(), {"cats": [TEXT * 99]}, tokens=400)
    assert not leaks(found), found.verdict
    assert judged(found) == ALL - {"padding"}  # for which it has no mask
    assert len(found.layers) == (0 if name == "dense" else 2)
    assert found.dtype == "float64"


@pytest.mark.parametrize("seed", range(6))
def test_a_dense_model_gives_no_alarm(seed: int) -> None:
    found = audited(random_dense(seed))
    assert not leaks(found), found.verdict
    assert "no experts" in found.verdict


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_200_dense_models_give_no_alarm() -> None:
    found = [audited(random_dense(seed)) for seed in range(200)]
    assert [each.verdict for each in found if each.leaks] == []


def random_dense(seed: int) -> Any:
    draw = random.Random(seed)
    name = draw.choice(list(DENSE))
    heads, layers = draw.choice([2, 4]), draw.randint(1, 4)
    sizes = {"hidden_size": 16 * heads, "num_attention_heads": heads, "num_hidden_layers": layers}
    sizes |= {"n_embd": 16 * heads, "n_head": heads, "n_layer": layers, "word_embed_proj_dim": 16 * heads}
    widths = {"num_key_value_heads": draw.choice([1, heads]), "intermediate_size": draw.choice([24, 64])}
    return random_model(name, DENSE[name] | sizes | widths, seed)


def drop_beyond_capacity(model: Any) -> None:
    """Each expert of the first layer takes at most its fair share of the batch, the first to come."""

    def drop(_module: nn.Module, _inputs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        scores, weights, ids = output
        taken = nn.functional.one_hot(ids, 8).sum(1).cumsum(0)
        return scores, weights * (taken.gather(1, ids) <= len(ids) * 2 / 8), ids

    model.model.layers[0].mlp.gate.register_forward_hook(drop)


def test_a_capacity_that_depends_on_the_batch_is_caught() -> None:
    model = mixture()
    drop_beyond_capacity(model)
    found = audited(model)
    assert leaks(found) == {"neighbours", "padding", "chunks"}
    assert "LEAKS through neighbours" in found.verdict
    assert "model.layers.0.mlp.gate" in found.verdict


def test_expert_choice_is_caught_in_training_and_passes_in_inference() -> None:
    model = swap_rule(mixture(), ExpertChoice(8, 2, pool="batch"))
    assert {"later tokens", "neighbours"} <= leaks(audited(model, training=True))
    assert not leaks(audited(model))
    assert not model.training


def test_expert_threshold_passes_in_training_too_once_it_is_warm_and_unbounded() -> None:
    model = swap_rule(mixture(), ExpertThreshold(8, 2, warmup_steps=0, capacity_slack=None))
    found = audited(model, training=True)
    assert not leaks(found), found.verdict
    assert found.dtype == "float64"


@pytest.mark.parametrize(("attention", "ahead"), [("eager", 1), ("sdpa", 1), ("sdpa", 0)])
def test_a_mask_off_by_one_or_without_padding_is_caught(
    attention: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model("Llama", {"attn_implementation": attention})
    module = "transformers.models.llama.modeling_llama.create_causal_mask"
    monkeypatch.setattr(module, lambda *args, **options: masks(ahead, *args, **options))
    found = leaks(audited(model))
    assert "later tokens" in found if ahead else found == {"padding"}


def masks(
    ahead: int, config: Any, inputs_embeds: Tensor, attention_mask: Any, past_key_values: Any, **_: Any
) -> Tensor:
    """A mask that shows so many tokens too many, and padding."""
    rows, time = inputs_embeds.shape[:2]
    past = 0 if past_key_values is None else past_key_values.get_seq_length()
    seen = torch.ones(time, past + time).tril(past + ahead) > 0
    return torch.where(seen, 0, torch.finfo(inputs_embeds.dtype).min).to(inputs_embeds).expand(rows, 1, -1, -1)


def test_without_memory_for_float64_a_leak_is_caught_and_rounding_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causality, "_memory", lambda device: 0.0)
    model = mixture()
    assert not leaks(found := audited(model)), found.verdict
    assert found.dtype == "float32"
    drop_beyond_capacity(model)
    assert "neighbours" in leaks(audited(model))


def test_a_model_that_draws_at_random_is_refused() -> None:
    model = random_model("GPT2", {})
    model.transformer.drop.register_forward_hook(lambda _module, _inputs, x: x * (1 + 0.1 * torch.rand_like(x)))
    with pytest.raises(ValueError, match="disable its randomness"):
        audited(model)


class Fixed(nn.Module):
    """Tokens 0 and 1 go to experts 0 and 1, and 1 and 2; the router returns a mask, as Switch's does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(64, 4), Fixed.Router()

    class Router(nn.Module):
        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mask = nn.functional.one_hot(tokens, 4) + nn.functional.one_hot((tokens + 1).clamp(max=2), 4)
            scores = torch.arange(tokens.numel()).view(*tokens.shape, 1) * torch.ones(4)
            return mask, scores[..., :1], scores

    def forward(self, input_ids: Tensor) -> Tensor:
        self.router(input_ids)
        logits: Tensor = self.embed(input_ids)
        return logits


def test_loads_pairs_and_drift_are_those_of_the_assignment() -> None:
    tokens = torch.tensor([0] * 10 + [1] * 20)
    (layer,) = measure(Fixed(), {"text": tokens}, 100)
    assert layer.load == {"text": [10, 30, 20, 0]}
    assert layer.dead == [3]
    assert layer.spread == 2
    assert layer.fanout == 2
    assert layer.fanout_counts == [0, 0, 30, 0, 0]
    assert [(first, second) for first, second, *_ in layer.pairs] == []  # none above chance: all have expert 1
    assert layer.drift == pytest.approx(15 / torch.arange(30.0).std(correction=0))
    (both,) = measure(Fixed(), {"a": tokens[:10], "b": tokens[10:]}, 100)
    assert both.information == pytest.approx(0.5)


def test_the_page_shows_each_layer_and_each_text(drawn: None) -> None:
    found = audited(mixture())
    page = audit_page(found)
    for layer in found.layers:
        assert layer.router in page
    assert "cats" in page
    assert "failed" not in page
    assert found.to_dict()["layers"][0]["fanout"] == 2


def test_what_a_model_casts_by_itself_is_computed_in_float64() -> None:
    x = torch.rand(3, dtype=torch.float64)
    with causality._Exact():
        assert x.float().equal(x)
        assert x.softmax(0, dtype=torch.float32).dtype == torch.ones(1).dtype == torch.float64
    assert x.float().dtype == torch.ones(1).dtype == torch.float32

"""Compares the decoder's kernel with torch's operations, at sizes that fill no vector, and bit by bit with itself."""

from __future__ import annotations

import gc
import random
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import PIECES, RULES, small_model
from expert_threshold.generate.decoder import Decoded, Decoder, library
from expert_threshold.generate.engine import Sampler, sample
from expert_threshold.kernels.cpu.decode import decoder_create, decoder_destroy
from expert_threshold.model import GPT
from expert_threshold.routing import ExpertThreshold, TokenChoice
from rounding import assert_rounded

from .test_decoder import ODD, SWIGLU

needs_kernel = pytest.mark.skipif(library() is None, reason="there is no C++ compiler, or kernels are switched off")
OPTIONS: dict[str, dict[str, Any]] = {
    "swiglu": SWIGLU,
    "two shared": {"shared_experts": 2, "gate_norm": "fanout"},
    "wide heads": {"d_model": 64, "heads": 1, "kv_heads": 1, "dense_layers": 0},
    "trunk": ODD | PIECES["all of them"],
}
SOFTMAX = (
    ExpertThreshold(4, 1, warmup_steps=2, gate="softmax"),
    ExpertThreshold(4, 1, warmup_steps=2, gate="softmax", null_scores=3),
    TokenChoice(4, 2, gate="softmax"),
    TokenChoice(4, 2, gate="softmax", null_scores=3),
)
ROWS = 7


def filled(model: GPT, rows: range = range(ROWS)) -> Decoder:
    """Return a decoder with a different prompt in each row."""
    decoder = Decoder(model, ROWS, 40)
    for row in rows:
        decoder.open(row)
        decoder.read(row, random.Random(row).choices(range(270), k=3 + row))
    return decoder


def steps(decoder: Decoder, rows: range = range(ROWS), count: int = 4) -> list[Decoded]:
    return [decoder.step({row: 10 * i + row for row in rows}) for i in range(count)]


def assert_same_bits(a: Decoded, b: Decoded) -> None:
    assert all(torch.equal(one, other) for one, other in zip((a[0], *a[2:4]), (b[0], *b[2:4]), strict=True))
    assert (a.peaks, a.assigned) == (b.peaks, b.assigned)


@needs_kernel
@pytest.mark.parametrize("rule", [*RULES.values(), *SOFTMAX], ids=[*RULES, *(rule.label for rule in SOFTMAX)])
def test_it_decodes_every_rule_whose_gates_are_of_scores_alone(rule: Any) -> None:
    assert Decoder(small_model(rule), 1, 8).kernel is not None


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize(("rule", "chosen"), [(TokenChoice(4, 2), [0, 1]), (ExpertThreshold(4, 1), [])])
@torch.no_grad()
def test_of_equal_scores_the_first_are_chosen_and_none_exceeds_an_equal_cutoff(rule: Any, chosen: list[int]) -> None:
    model = small_model(rule, steps=0)  # its cutoffs are 0
    for _, moe in model.moe_layers():
        moe.router.weight.zero_()
    (decoded,) = steps(filled(model), count=1)
    assert decoded.assignment.tolist() == [[[expert in chosen for expert in range(4)]] * ROWS] * 2


@needs_kernel
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bfloat16_decoding_errs_by_no_more_than_its_rounding(options: dict[str, Any]) -> None:
    """Unlike torch, the kernel does not round activations. Every expert is chosen, so that rounding decides nothing."""
    model = small_model(TokenChoice(4, 4), **options)
    exact = [decoded.logits for decoded in steps(filled(model))]
    model.compute_dtype = torch.bfloat16
    found = [decoded.logits for decoded in steps(filled(model))]
    times = 4 if options.get("residual_scalars") else 2  # the scalars are rounded too, once a layer
    assert_rounded(torch.stack(found), torch.stack(exact), times)


@needs_kernel
@torch.no_grad()
def test_keys_and_values_are_rounded_to_the_nearest() -> None:
    model = small_model()
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())
    exact = filled(model).cache.held
    model.compute_dtype = torch.bfloat16
    assert torch.equal(filled(model).cache.held[0], exact[0].bfloat16())


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_company_and_the_number_of_threads_change_no_bit(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(**options)
    model.compute_dtype = dtype
    together = steps(filled(model))
    monkeypatch.setattr("expert_threshold.generate.decoder.SHARED", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for decoded, shared in zip(together, steps(filled(model)), strict=True):
        assert_same_bits(decoded, shared)
    for row in (0, 4):
        of_row = range(row, row + 1)
        for decoded, alone in zip(together, steps(filled(model, of_row), of_row), strict=True):
            assert torch.equal(decoded.logits[row : row + 1], alone.logits)
            assert torch.equal(decoded.assignment[:, row : row + 1], alone.assignment)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_has_the_same_bits_in_pieces_of_any_length(dtype: torch.dtype) -> None:
    model, prompt = small_model(dtype=dtype, **PIECES["all of them"]), random.Random(0).choices(range(270), k=30)
    whole, pieces = Decoder(model, 2, 40), Decoder(model, 2, 40)
    for decoder in (whole, pieces):
        decoder.open(1)
    logits = whole.read(1, prompt, every=True).logits
    ends = [0, 1, 8, 12, 13, 30]
    parts = [pieces.read(1, prompt[a:b], every=True).logits for a, b in pairwise(ends)]
    assert torch.equal(torch.cat(parts), logits)
    whole.open(1)
    assert torch.equal(whole.read(1, prompt).logits, logits[-1:])


@needs_kernel
def test_a_sequence_of_nan_leaves_the_others_as_they_are() -> None:
    model = small_model()
    expected = filled(model).step({0: 1, 1: 2, 2: 3}).logits
    with torch.no_grad():
        model.embed.weight[2] = torch.nan
    decoded = filled(model, range(3)).step({0: 1, 1: 2, 2: 3})
    assert decoded.logits[1].isnan().all()
    assert torch.tensor(decoded.peaks[1][1:]).isnan().all()
    assert not decoded.assignment[:, 1].any()
    assert torch.equal(decoded.logits[::2], expected[::2])


@pytest.mark.usefixtures("by")
def test_an_id_beyond_the_vocabulary_is_refused() -> None:
    decoder = filled(small_model())
    for token in (-300, 270):
        with pytest.raises(IndexError):
            decoder.step({0: token})


@needs_kernel
@given(
    temperature=st.floats(1e-3, 10),
    top_k=st.none() | st.integers(1, 600),
    top_p=st.just(1.0) | st.floats(0.01, 1),
    seed=st.integers(0, 99),
    vocab=st.sampled_from([50, 500]),
)
def test_a_sample_is_the_same_token_as_by_operations(
    temperature: float, top_k: int | None, top_p: float, seed: int, vocab: int
) -> None:
    logits = 3 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))
    sampler = Sampler(temperature, top_k, torch.Generator().manual_seed(seed), top_p)
    number = float(torch.rand((), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    assert sampler(logits) == sample(logits, temperature, min(top_k or vocab, vocab), top_p, number)


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("top_k", [None, 3])
def test_no_token_is_drawn_from_nan(top_k: int | None) -> None:
    logits = torch.tensor([0.0, torch.nan, 1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="logits contain NaN"):
        Sampler(1.0, top_k, torch.Generator())(logits)


def test_other_dtypes_are_decoded_by_operations() -> None:
    model = small_model(ExpertThreshold(4, 1))
    model.compute_dtype = torch.float64
    assert Decoder(model, 1, 4).kernel is None


@needs_kernel
def test_a_decoder_that_is_gone_leaves_nothing_in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    destroy = mock.Mock(side_effect=decoder_destroy)
    monkeypatch.setattr("expert_threshold.generate.decoder.decoder_destroy", destroy)
    decoder = Decoder(small_model(RULES["expert_threshold"]), 1, 8)
    created = decoder.kernel._decoder
    destroy.assert_not_called()
    del decoder
    gc.collect()
    destroy.assert_called_once_with(created)


@needs_kernel
def test_weights_of_another_dtype_than_the_cache_are_refused() -> None:
    """Regression: they were read as if they had the cache's dtype."""
    embed, cos, cache = torch.zeros(5, 32), torch.zeros(8, 16), torch.zeros(1, 1, 8, 2, 1, 32).bfloat16()
    last = torch.zeros(1, 0).bfloat16()
    none: dict[str, Any] = {"smear_gate": None, "smear": 0.0, "backout": 0.0, "qk_scale": 1.0, "offset_from": 1}
    with pytest.raises(RuntimeError, match="a tensor's numbers do not have type BFloat16"):
        decoder_create(
            embed=embed, head=embed, cos=cos, sin=cos, cache=cache, last=last, eps=1e-7, softcap=15.0, **none
        )

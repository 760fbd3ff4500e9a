"""`et retrofit`: a top-k checkpoint becomes one of variable fanout, beside an honest comparison."""

from __future__ import annotations

import signal
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cases import RULES, et, small_model, small_tokenizer, write_run, write_text
from commands import Options, Refused, read
from expert_threshold.data import Loader, Tokens, open_source, pack
from expert_threshold.evaluation import evaluate
from expert_threshold.evaluation.by_document import compare
from expert_threshold.integrations import retrofit
from expert_threshold.integrations.retrofit import Calibrator, Checkpoint, at_top, document_sums, open_checkpoint
from expert_threshold.model.calibrate import calibrate
from expert_threshold.routing import Rule, TokenChoice
from expert_threshold.runs import load_model
from mixtures import mixture

FAST: Options = ["--tokens", 512, "--batch-size", 4, "--eval-tokens", 1500, "--dtype", "float32"]
TOP = TokenChoice(4, 2, balance="loss_free")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "corpus.jsonl", documents=30)


def checkpoint(folder: Path, text: Path, rule: Rule | None = TOP) -> Checkpoint:
    model = small_model(rule)
    for _, moe in model.moe_layers():
        if rule == TOP:
            moe.router.state.bias.normal_(std=0.3)
    write_run(folder, model, text=text)
    return open_checkpoint(str(folder), None, torch.device("cpu"), torch.float32)


def batches(source: Checkpoint, text: Path, count: int = 8) -> list[Any]:
    tokens = pack(open_source(str(text)), source.tokenizer, "train")
    return list(islice(Loader(tokens, 4, source.context, 0), count))


def distilled(source: Checkpoint, student: Any, text: Path, steps: int, lr: float, work: Path, **options: Any) -> None:
    options |= {"progress": lambda *_: None, "stop": lambda: False}
    retrofit.distill(source.model, student, iter(batches(source, text, 40)), steps, lr, work, **options)


def losses(source: Checkpoint, model: Any, ids: Any) -> tuple[float, float]:
    nats, fanout = document_sums(source, model, ids)
    return nats / (len(ids) - 1), fanout / (len(ids) - 1)


def test_a_comparison_finds_who_is_better_by_how_much_between_two_static_points() -> None:
    generator = np.random.default_rng(0)
    targets = generator.integers(100, 900, 50)
    spread = targets * generator.normal(0, 1, 50)  # documents differ by far more than models do, alike for all

    def sums(loss: float, fanout: float) -> Any:
        noise = targets * generator.normal(0, 0.01, 50)
        return np.stack([targets * loss + spread + noise, targets * fanout], 1)

    static = [sums(loss, k) for k, loss in enumerate((3.0, 2.0, 1.8))]
    for off, lower in ((0.1, "static"), (-0.1, "variable"), (0.0, "open")):
        found = compare(static, sums(1.95 + off, 1.25), targets.tolist())
        assert found.lower == lower
        assert found.fanout == pytest.approx(1.25)
        assert found.difference == pytest.approx(off, abs=0.01)
        assert found.difference == pytest.approx(found.loss - (found.static_loss or 0))
        assert found.interval[0] < found.difference < found.interval[1]
        assert found.interval[1] - found.interval[0] < 0.05  # paired by document
    assert compare(static, sums(1.5, 2.1), targets.tolist()).lower is None
    few = [each[:9] for each in static], sums(1.5, 1.25)[:9], targets.tolist()[:9]
    assert compare(*few).lower == "open", "nine documents do not decide"


def test_each_way_to_set_cutoffs_keeps_its_promise(tmp_path: Path, text: Path) -> None:
    source = checkpoint(tmp_path / "run", text)
    some = batches(source, text)
    found = retrofit.sample(source.model, some, lambda done: None)
    rule = replace(retrofit.threshold_rule(source.rule, 1.5), experts_per_token=1.5)
    cutoffs = {}
    for way in ("loads", "scores", "norms"):
        model = source.with_rule(rule)
        Calibrator.of(way, source, found.norms).set(model, found.scores)  # type: ignore[arg-type]
        cutoffs[way] = [router.thresholds() for router in retrofit.routers(model).values()]
        for scores, c in zip(found.scores, cutoffs[way], strict=True):
            assert float((scores > c).float().sum(-1).mean()) == pytest.approx(1.5, abs=0.1), way
    for layer, scores in enumerate(found.scores):
        loads = (scores > cutoffs["loads"][layer]).float().mean(0)
        torch.testing.assert_close(loads, torch.full((4,), 1.5 / 4), atol=0.02, rtol=0)
        bias = list(retrofit.routers(source.model).values())[layer].state.bias
        assert float((cutoffs["scores"][layer] + bias).std()) < 1e-5
        least = cutoffs["norms"][layer].sigmoid() * found.norms[layer]
        closed = cutoffs["norms"][layer] >= scores.amax(0)  # the norm is too small for any gate
        assert not closed.all()
        torch.testing.assert_close(least[~closed], least.max().expand_as(least)[~closed], atol=0, rtol=0.01)
    whole = source.with_rule(rule)
    calibrate(whole, some[:1])
    one = retrofit.sample(source.model, some[:1], lambda done: None)
    Calibrator.of("loads", source, one.norms).set(model, one.scores)
    first = (each.moe_layers()[0][1].router.thresholds() for each in (model, whole))
    torch.testing.assert_close(*first, atol=0.05, rtol=0)


def test_norms_are_of_the_experts_outputs_for_the_tokens_that_go_to_them(tmp_path: Path, text: Path) -> None:
    source = checkpoint(tmp_path / "run", text)
    (batch,) = batches(source, text, 1)
    found = retrofit.sample(source.model, [batch], lambda done: None)
    with torch.no_grad(), retrofit.recorded(source.model) as seen:
        source.model(batch.tokens)
    (_, moe), (x, routing) = source.model.moe_layers()[1], seen[1]
    for expert in range(4):
        mine = x[routing.assignment[..., expert]]
        out = (mine @ moe.experts.up[expert].T).relu().square() @ moe.experts.down[expert].T
        torch.testing.assert_close(found.norms[1][expert], out.norm(dim=-1).mean())


def test_static_points_are_the_model_with_another_k(tmp_path: Path, text: Path) -> None:
    source = checkpoint(tmp_path / "run", text)
    tokens = batches(source, text, 1)[0].tokens
    for k in range(1, 5):
        other = source.with_rule(replace(TOP, experts_per_token=k))
        for name, value in source.model.state_dict().items():
            other.state_dict()[name].copy_(value)
        with at_top(source.model, TOP, k):
            assert torch.equal(source.model(tokens).logits, other(tokens).logits)
    assert source.model.moe_layers()[0][1].router.rule == TOP
    ids = pack(open_source(str(text)), source.tokenizer, "validation").ids[:100]
    expected = evaluate(source.model, Tokens(ids, np.array([0, 100]), 0), source.tokenizer)
    assert losses(source, source.model, ids)[0] == pytest.approx(expected.loss, rel=1e-5)


def test_with_all_experts_both_routings_are_the_same_model(tmp_path: Path, text: Path) -> None:
    for gate in ("sigmoid", "softmax", "softmax_chosen", "sigmoid_normalised"):
        source = checkpoint(tmp_path / gate, text, TokenChoice(4, 2, gate=gate, gate_scale=2.5))
        model = source.with_rule(retrofit.threshold_rule(source.rule, 2))
        Calibrator.of("scores", source, []).set(model, [torch.randn(99, 4)] * 2)
        model.set_rate(4)
        ids = pack(open_source(str(text)), source.tokenizer, "validation").ids[:100]
        with at_top(source.model, source.rule, 4):
            assert losses(source, model, ids) == pytest.approx(losses(source, source.model, ids), rel=1e-6)
        model.set_rate(0)
        assert losses(source, model, ids)[1] == 0


def run(folder: Path, text: Path, out: Path, *options: object) -> int:
    return et("retrofit", folder, "--to", out, "--data", text, *FAST, *options)


def measured(source: Checkpoint, model: Any, text: Path, report: Any) -> Any:
    """The model's loss and fanout on the documents of the report, which are all held-out ones."""
    documents = pack(open_source(str(text)), source.tokenizer, "validation")
    assert report["documents"] == documents.documents
    sums = [document_sums(source, model, documents.ids[a:b]) for a, b in pairwise(documents.offsets)]
    return np.sum(sums, 0) / report["tokens"]


def test_the_report_measures_the_new_folder(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "run", text)
    assert run(tmp_path / "run", text, tmp_path / "new", "--distill-routers", 30, "--lr", 0.01) == 0
    report, printed = read(tmp_path / "new" / "retrofit.json"), capsys.readouterr().out
    assert (tmp_path / "new" / "retrofit.md").read_text() == printed
    assert len(report["static"]) == 5
    model, _ = load_model(tmp_path / "new")
    nats, fanout = measured(source, model, text, report)
    last = report["variable"]["scores, distilled routers at 2"]
    assert nats == pytest.approx(last["loss"], rel=1e-5)
    assert fanout == pytest.approx(last["fanout"], rel=1e-5)
    weights = {n: w for n, w in source.model.named_parameters() if not torch.equal(w, model.get_parameter(n))}
    assert weights
    assert all(".router." in name for name in weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "run"]


def test_distillation_brings_the_predictions_closer(tmp_path: Path, text: Path) -> None:
    source = checkpoint(tmp_path / "run", text)
    found = retrofit.sample(source.model, batches(source, text), lambda done: None)
    calibrator = Calibrator.of("loads", source, found.norms)
    tokens = batches(source, text, 1)[0].tokens
    wanted = source.model(tokens).logits.softmax(-1).detach()
    far = []
    for steps in (0, 40):
        student = source.with_rule(retrofit.threshold_rule(source.rule, 1))
        calibrator.set(student, found.scores)
        work = tmp_path / str(steps)
        distilled(source, student, text, steps, 3e-3, work, routers_only=False, calibrator=calibrator)
        far.append(float((wanted * (wanted / student(tokens).logits.detach().softmax(-1)).log()).sum(-1).mean()))
        before = [router.thresholds() for router in retrofit.routers(student).values()]
        again = retrofit.sample(student, batches(source, text), lambda done: None)
        calibrator.set(student, again.scores)
        for old, router in zip(before, retrofit.routers(student).values(), strict=True):
            torch.testing.assert_close(old, router.thresholds(), atol=0.45, rtol=0)  # they have followed the scores
    assert far[1] < 0.5 * far[0]


def test_steps_smaller_than_the_rounding_of_bfloat16_weights_add_up(tmp_path: Path, text: Path) -> None:
    source = checkpoint(tmp_path / "run", text)
    student = source.with_rule(retrofit.threshold_rule(source.rule, 1)).bfloat16()
    found = retrofit.sample(source.model, batches(source, text), lambda done: None)
    before = [router.weight.detach().clone() for router in retrofit.routers(student).values()]
    calibrator = Calibrator.of("loads", source, found.norms)
    distilled(source, student, text, 40, 1e-4, tmp_path / "work", routers_only=True, calibrator=calibrator)
    for old, router in zip(before, retrofit.routers(student).values(), strict=True):
        assert (old != router.weight).float().mean() > 0.5


def test_stopped_anywhere_and_repeated_it_gives_what_it_gives_in_one_go(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    checkpoint(tmp_path / "run", text)
    options: Options = ["--distill-routers", 9, "--distill-all", 9, "--experts-per-token", 1, "--eval-tokens", 300]
    assert run(tmp_path / "run", text, tmp_path / "one", *options) == 0
    document, clip, calls = retrofit.document_sums, torch.nn.utils.clip_grad_norm_, 0

    def stopping(call: Any) -> Any:
        def called(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % 19 == 7:
                signal.raise_signal(signal.SIGINT)
            return call(*given)

        return called

    monkeypatch.setattr("expert_threshold.integrations.retrofit.document_sums", stopping(document))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", stopping(clip))
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").symlink_to("empty")
    codes = [130]
    while codes[-1] == 130:
        codes.append(run(tmp_path / "run", text, tmp_path / "two", *options))
        assert any((tmp_path / "two").iterdir()) == (codes[-1] == 0)
        if len(codes) == 2:
            arguments = ["retrofit", tmp_path / "run", "--to", tmp_path / "two", "--data", text]
            refused(arguments, f"{tmp_path / 'two.partial'} contains unfinished work with other options")
    assert codes[-1] == 0
    assert len(codes) > 4
    one, two = (read(tmp_path / name / "retrofit.json") for name in ("one", "two"))
    assert one["variable"] == two["variable"]
    models = [load_model(tmp_path / name)[0].state_dict() for name in ("one", "two")]
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


def test_what_cannot_be_retrofitted_is_refused_and_leaves_nothing(tmp_path: Path, text: Path, refused: Refused) -> None:
    for name in ("dense", "token_choice", "expert_threshold"):
        write_run(tmp_path / name, small_model(RULES[name]), text=text)
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "nonesuch"}')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "other.partial").mkdir()
    before = sorted(tmp_path.iterdir())
    other = ["retrofit", tmp_path / "token_choice", "--to", tmp_path / "other", "--data", text]
    refused(other, f"{tmp_path / 'other.partial'} contains unfinished work with other options")
    top: Options = ["retrofit", tmp_path / "token_choice", "--to", tmp_path / "new", "--data"]
    refused([*top, text, "--experts-per-token", 5], "experts_per_token=5.0 must be", "at most num_experts=4")
    refused([*top, tmp_path / "empty.jsonl"], "empty.jsonl", "no documents")
    for name, why in (("dense", "no experts"), ("expert_threshold", "not by top k"), ("none", "no such run folder")):
        refused(["retrofit", tmp_path / name, "--to", tmp_path / "new", "--data", text], str(tmp_path / name), why)
    pytest.importorskip("transformers")
    refused(["retrofit", tmp_path / "unknown", "--to", tmp_path / "new", "--data", text], "nonesuch")
    assert sorted(tmp_path.iterdir()) == before


def test_experts_in_a_latent_space_have_outputs_of_the_models_width() -> None:
    pytest.importorskip("transformers")
    block, x = mixture("NemotronH").model.layers[1].mixer, torch.randn(5, 32)
    inner = x @ block.fc1_latent_proj.weight.T @ block.experts.up_proj[1].T
    outer = inner.relu().square() @ block.experts.down_proj[1].T @ block.fc2_latent_proj.weight.T
    torch.testing.assert_close(retrofit._output(block, x, 1), outer)


def test_a_mixture_of_transformers_is_retrofitted_and_loads_again(tmp_path: Path, text: Path, refused: Refused) -> None:
    transformers = pytest.importorskip("transformers")
    from expert_threshold.integrations.swap import SwappedRouter, swap_rule

    torch.manual_seed(0)
    sizes = {"vocab_size": 272, "hidden_size": 32, "moe_intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 16}
    config = transformers.Qwen3MoeConfig(
        num_experts=8, num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=2, norm_topk_prob=True,
        max_position_embeddings=64, **sizes,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "mixture")
    small_tokenizer().save(tmp_path / "tokenizer.json")
    own = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|bos|>")
    own.save_pretrained(tmp_path / "mixture")
    assert run(tmp_path / "mixture", text, tmp_path / "new", "--distill-all", 3, "--cutoffs", "norms") == 0
    report = read(tmp_path / "new" / "retrofit.json")
    again = swap_rule(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval())
    assert sum(isinstance(module, SwappedRouter) for module in again.modules()) == 2
    source = open_checkpoint(str(tmp_path / "mixture"), None, torch.device("cpu"), torch.float32)
    nats, fanout = measured(source, again, text, report)
    last = report["variable"]["norms, distilled all at 2"]
    assert nats == pytest.approx(last["loss"], rel=1e-4)
    assert fanout == pytest.approx(last["fanout"], rel=1e-2)
    refused(["retrofit", tmp_path / "new", "--to", tmp_path / "newer", "--data", text], "routes by expert_threshold")


def test_one_cutoff_is_on_the_values_that_the_checkpoint_compares_with_its_biases() -> None:
    scores = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    bias = torch.tensor([0.9, 0.1, 0.0, 0.2])
    for sigmoid, values in ((False, scores + bias), (True, scores.sigmoid() + bias)):
        cutoffs = Calibrator("scores", 4, sigmoid, [bias]).sketch(0, scores)
        level = len(cutoffs) // 2
        chosen, expected = scores > cutoffs[level], values > values.flatten().median()
        assert (chosen == expected).float().mean() > 0.99

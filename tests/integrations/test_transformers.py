"""The exported model in Hugging Face transformers: the same numbers by every interface that its own mixtures follow."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cases import NULL_SCORES, RULES, small_model, small_tokenizer, write_run
from expert_threshold.generate import generate
from expert_threshold.integrations.export import export_run, import_folder
from expert_threshold.integrations.follow import follow
from expert_threshold.model import GPT, TRUNKS, GPTConfig
from expert_threshold.routing import ExpertThreshold, NullSlots, Rule, SeqTopK, TokenChoice, register_rule
from expert_threshold.runs import load_model

# Its classes are imported on first use, which takes seconds, rather than by every worker that collects tests.
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
if find_spec("accelerate") is None:
    pytest.skip("needs accelerate: pip install -e '.[hf]'", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "examples" / "new_rule"))
from min_p_rule import MinP  # noqa: E402  a rule of another distribution

TRUNK = TRUNKS["nanochat"] | {"key_offset": "all", "windows": "SL", "short_window": 5}
TABLE: dict[str, tuple[Rule | None, dict[str, Any]]] = {
    f"{trunk}, {name}": (rule, pieces | options)
    for trunk, pieces in {"paper's": {}, "default": TRUNKS["tuned"], "short of sight": TRUNK | {"kv_heads": 1}}.items()
    for name, rule, options in (
        ("expert_threshold", RULES["expert_threshold"], {}),
        ("expert_choice", RULES["expert_choice"], {"gate_norm": "fanout", "dense_layers": 0}),
        ("token_choice", RULES["token_choice"], {"activation": "swiglu", "shared_experts": 0}),
        ("foreign", MinP(4, 2), {}),
    )
}
"""Trunks × rules, by which every interface is tried."""

OTHERS: dict[str, tuple[Rule | None, dict[str, Any]]] = {
    "dense": (None, {}),
    "loss_free": (RULES["loss_free"], {}),
    "trend": (ExpertThreshold(4, 1, warmup_steps=2, decay=0.5, estimator="trend"), {}),
    "null_scores": (NULL_SCORES, {}),
    "copies": (NullSlots(4, 1, null="copy"), {}),
    "sequence": (SeqTopK(4, 1), {}),
}
MODELS = TABLE | OTHERS
OURS = "paper's, expert_threshold"
DEFAULT = "default, expert_threshold"
SHORT = "short of sight, foreign"
PROMPTS = ["the cat sat", "hat", "the mat; the hat of the <|bos|> cat"]
GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 269}
STATIC = {"cache_implementation": "static", "disable_compile": True}

Folder = Callable[[str], Path]


@pytest.fixture(autouse=True, scope="module")
def ready() -> Iterator[None]:
    """Register our model, and show no progress."""
    import expert_threshold.integrations.transformers  # noqa: F401

    register_rule("min_p", MinP)
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of an exported run, by the model's name."""
    path = tmp_path_factory.mktemp("folders")

    @cache
    def folder(name: str) -> Path:
        rule, options = MODELS[name]
        to = path / re.sub(r"\W+", "_", name)
        write_run(to.with_name(f"run-{to.name}"), small_model(rule, **options))
        return export_run(to.with_name(f"run-{to.name}"), to)

    return folder


@pytest.fixture(scope="module")
def folder(exported: Folder) -> Path:
    return exported(OURS)


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def ours(folder: Path, dtype: torch.dtype = torch.float32) -> GPT:
    return load_model(folder.with_name(f"run-{folder.name}"), compute_dtype=dtype)[0]


def tokens(batch: int = 3, time: int = 40) -> torch.Tensor:
    return torch.randint(269, (batch, time), generator=torch.Generator().manual_seed(0))


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_near(found: torch.Tensor, expected: torch.Tensor, near: float = 2e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


# The table: interfaces × trunks × rules. Each takes the loaded model and its logits by our own forward.


def every_implementation_of_experts(model: Any, logits: torch.Tensor) -> None:
    """Their logits and gradients are equal, and none is given a pair that has no weight."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    expected = gradients(model, tokens())
    for name in ("eager", "grouped_mm", "batched_mm", "expert_threshold"):
        model.set_experts_implementation(name)
        assert_near(model(tokens()).logits, logits)
        for parameter, gradient in gradients(model, tokens()).items():
            torch.testing.assert_close(gradient, expected[parameter], rtol=1e-4, atol=1e-6)
    weights: list[torch.Tensor] = []
    grouped = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    with pytest.MonkeyPatch.context() as patch:
        seen = lambda self, x, ids, given: (weights.append(given), grouped(self, x, ids, given))[1]  # noqa: E731
        patch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, "grouped_mm", seen)
        model.set_experts_implementation("grouped_mm")
        assert_near(model(tokens()).logits, logits)
    assert weights
    assert all(bool((given != 0).all()) for given in weights)


def every_implementation_of_attention(model: Any, logits: torch.Tensor) -> None:
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        assert_near(model(tokens()).logits, logits)


def routers_return_scores_weights_and_distinct_ids(model: Any, logits: torch.Tensor) -> None:
    shown: list[tuple[torch.Tensor, ...]] = []
    for block in model.model.blocks:
        if block.moe is not None:
            block.moe.router.register_forward_hook(lambda _module, _given, found: shown.append(found))
    recorded = model.model(tokens(), output_router_logits=True).router_logits
    for (scores, weights, ids), record in zip(shown, recorded, strict=True):
        assert torch.equal(scores, record)
        assert weights.shape == ids.shape
        most = max(int((weights != 0).sum(-1).max()), 1)
        assert ids.shape[1] == most
        assert 0 <= int(ids.min()) <= int(ids.max()) < model.config.rule["num_experts"]
        assert all(len(set(row)) == most for row in ids.tolist())


def caches_write_what_is_written_without_one(model: Any, logits: torch.Tensor) -> None:
    prompt = tokens()[:, :10]
    expected = model.generate(prompt, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(prompt, **GREEDY), expected)
    for options in (STATIC, {"prefill_chunk_size": 3}):
        assert torch.equal(model.generate(prompt, **GREEDY, **options), expected), options
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model}):  # which take back what they guessed
        assert torch.equal(model.generate(prompt[:1], **GREEDY, **options), expected[:1]), options
    beams = model.generate(prompt, use_cache=False, num_beams=3, **GREEDY)
    assert torch.equal(model.generate(prompt, num_beams=3, **GREEDY), beams)


def a_cache_is_continued(model: Any, logits: torch.Tensor) -> None:
    held = transformers.DynamicCache(config=model.config)
    written = model.generate(tokens()[:, :10], past_key_values=held, **GREEDY)
    more = torch.cat((written, tokens()[:, 20:25]), 1)
    options = {"attention_mask": torch.ones_like(more), **GREEDY}  # else written tokens like padding are not seen
    expected = model.generate(more, use_cache=False, **options)
    assert torch.equal(model.generate(more, past_key_values=held, **options), expected)
    held.reset()
    assert torch.equal(model.generate(more, past_key_values=held, **options), expected)


def left_padding_changes_nothing(model: Any, logits: torch.Tensor) -> None:
    mask = torch.tensor([[0] * 5 + [1] * 35, [1] * 40, [0] * 39 + [1]])
    padded = model(tokens(), attention_mask=mask).logits
    for row, ids, found in zip(mask.bool(), tokens(), padded, strict=True):
        assert_near(found[row], model(ids[row][None]).logits[0])
    mask, prompt = mask[:2, :12], tokens()[:2, :12]
    written = model.generate(prompt, attention_mask=mask, **GREEDY)
    for options in ({"use_cache": False}, STATIC):
        assert torch.equal(model.generate(prompt, attention_mask=mask, **GREEDY, **options), written)
    assert torch.equal(written[:1, 5:], model.generate(prompt[:1, 5:], **GREEDY))


def packed_sequences_are_independent(model: Any, logits: torch.Tensor) -> None:
    """Regression: smear and key offset read the end of the sequence before, by 0.9 in the logits."""
    rows = [tokens()[:1, :15], tokens()[1:2, :25]]
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    expected = torch.cat([model(row).logits for row in rows], 1)
    for mode in (model.eval, model.train):
        mode()
        for options in ({}, {"use_cache": False}):
            assert_near(model(torch.cat(rows, 1), position_ids=positions, **options).logits, expected)


def a_resized_vocabulary_is_saved_and_loaded(model: Any, logits: torch.Tensor, tmp_path: Path) -> None:
    """Regression: value embeddings kept their size, so that a new token raised and the folder was refused."""
    model.resize_token_embeddings(280)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert_near(again(tokens()).logits[..., :270], logits)
    assert again(torch.full((1, 3), 279)).logits.shape == (1, 3, 280)


INTERFACES: list[Callable[..., None]] = [
    every_implementation_of_experts,
    every_implementation_of_attention,
    routers_return_scores_weights_and_distinct_ids,
    caches_write_what_is_written_without_one,
    a_cache_is_continued,
    left_padding_changes_nothing,
    packed_sequences_are_independent,
    a_resized_vocabulary_is_saved_and_loaded,
]


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("interface", INTERFACES)
def test_every_interface_gives_our_numbers(exported: Folder, interface: Any, name: str, tmp_path: Path) -> None:
    logits = ours(exported(name))(tokens()).logits
    places = [tmp_path] if "saved" in interface.__name__ else []
    interface(load(exported(name)), logits.detach(), *places)


@pytest.mark.skipif(shutil.which("g++") is None, reason="flex attention is compiled, which needs g++")
@pytest.mark.filterwarnings("ignore")  # inside torch and transformers
@pytest.mark.parametrize("name", [DEFAULT, SHORT])
@torch.no_grad()
def test_flex_attention_gives_our_numbers(exported: Folder, name: str) -> None:
    found = load(exported(name), attn_implementation="flex_attention")(tokens()).logits
    assert_near(found, ours(exported(name))(tokens()).logits)


@pytest.mark.parametrize("name", OTHERS)
def test_logits_and_gradients_equal_ours_under_frozen_routing(exported: Folder, name: str) -> None:
    model, info = load(exported(name), output_loading_info=True)
    assert not any(info.values()), info
    reference = ours(exported(name)).eval()
    assert_near(model(tokens()).logits, reference(tokens()).logits)
    targets = torch.cat((tokens()[:, 1:], torch.full((3, 1), -1)), 1)
    expected = reference(tokens(), targets)
    model.train()
    torch.testing.assert_close(model(tokens(), labels=tokens()).loss, expected.cross_entropy, rtol=1e-5, atol=1e-5)
    expected.loss.backward()
    found = {re.sub(r"^(model\.)?", "", name): gradient for name, gradient in gradients(model, tokens()).items()}
    for weight_name, weight in reference.named_parameters():
        weight_name = weight_name.replace("head.weight", "lm_head.weight")
        weight_name = re.sub(r"(experts\.\w+)$", r"\1_proj", weight_name)
        torch.testing.assert_close(found[weight_name], weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's tracer
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "expert_threshold"])
def test_the_model_is_one_graph(exported: Folder, implementation: str) -> None:
    """Where graphs are traced no number may depend on the data, so that tokens have all experts, unused ones with 0."""
    model = load(exported(DEFAULT), experts_implementation=implementation)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits = compiled(tokens(), use_cache=False).logits
    assert_near(logits, ours(exported(DEFAULT))(tokens()).logits)
    logits.sum().backward()
    torch._dynamo.reset()


def test_the_model_is_exported_with_a_dynamic_batch(exported: Folder) -> None:
    inputs = {"input_ids": tokens(), "use_cache": False}
    shapes = {"input_ids": {0: torch.export.Dim("batch", min=1, max=64)}, "use_cache": None}
    program = torch.export.export(load(exported(DEFAULT)), (), inputs, dynamic_shapes=shapes, strict=False)
    found = program.module()(input_ids=tokens(5), use_cache=False).logits
    assert_near(found, ours(exported(DEFAULT))(tokens(5)).logits)


def test_embeddings_stand_for_tokens_where_no_table_needs_them(exported: Folder) -> None:
    model = load(exported(OURS))
    embedded = model.model.embed(tokens()[:, :10])
    found = model.generate(inputs_embeds=embedded, **GREEDY)
    assert torch.equal(found, model.generate(tokens()[:, :10], **GREEDY)[:, 10:])
    with pytest.raises(ValueError, match="value embeddings need the tokens"):
        load(exported(DEFAULT))(inputs_embeds=embedded)


def test_a_rule_that_looks_at_sequences_generates_without_a_cache(exported: Folder) -> None:
    """Regression: with use_cache=True, which the harness passes, it raised."""
    model = load(exported("sequence"))
    expected = model.generate(tokens()[:1, :10], use_cache=False, **GREEDY)
    assert torch.equal(model.generate(tokens()[:1, :10], use_cache=True, **GREEDY), expected)


def test_inputs_that_a_model_would_read_wrongly_are_refused(exported: Folder) -> None:
    cache, whole = transformers.DynamicCache, "needs whole sequences"
    for name, words, inputs in (
        (DEFAULT, r"DynamicCache\(config=model.config\)", {"past_key_values": cache()}),
        (SHORT, "pass one of this shape", {"attention_mask": torch.ones(3, 1, 40, 40, dtype=torch.bool)}),
        (OURS, "output_attentions=True", {"output_attentions": True}),
        ("sequence", whole, {"past_key_values": cache()}),
        ("sequence", whole, {"attention_mask": torch.tensor([[0] + [1] * 39] * 3)}),
        ("sequence", whole, {"position_ids": torch.arange(40)[None] % 20}),
    ):
        with pytest.raises(ValueError, match=words):
            load(exported(name))(tokens(), **inputs)


@pytest.mark.parametrize("name", [DEFAULT, SHORT, "sequence"])
def test_engines_that_mix_requests_in_one_row_are_refused(exported: Folder, name: str) -> None:
    """Smear and key offset would read the token of another request, silently."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flat", lambda *_, **__: None)
        remedy = "another --rule" if name == "sequence" else "--model.key-offset none"
        with pytest.raises(ValueError, match=f"flat batches.*train with.*{remedy}"):
            transformers.AutoModel.from_pretrained(exported(name), attn_implementation="flat")
        transformers.AutoModel.from_pretrained(exported(OURS), attn_implementation="flat")


def test_engines_leave_the_experts_to_our_code(folder: Path) -> None:
    """vLLM replaces `experts` by its own, with SiLU, where the configuration counts them by one of these names."""
    config = transformers.AutoConfig.from_pretrained(folder)
    for name in ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts", "block_configs"):
        assert not hasattr(config, name)


def test_every_linear_layer_is_plain_and_reads_its_own_width(exported: Folder) -> None:
    """Regression: gates got wider inputs, so that adapters and quantisers of linear layers ended in shape errors."""
    model, widths = load(exported(DEFAULT)), {}
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    for linear in linears:
        assert type(linear) is torch.nn.Linear
        linear.register_forward_pre_hook(lambda module, given: widths.update({module: given[0].shape[-1]}))
    model(tokens())
    assert widths == {linear: linear.in_features for linear in linears}


def test_special_strings_are_tokens_unless_the_caller_says_otherwise(exported: Folder) -> None:
    """Regression: chat templates' <|bos|> became characters, silently."""
    tokenizer, bos = transformers.AutoTokenizer.from_pretrained(exported(OURS)), small_tokenizer().bos
    tokenizer.chat_template = "{% for m in messages %}<|bos|>{{ m.content }}{% endfor %}<|bos|>"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the cat"}], return_dict=False)
    assert chat == [bos, *small_tokenizer().encode("the cat"), bos]
    as_trained = tokenizer("a <|bos|> b", split_special_tokens=True).input_ids
    assert as_trained == [bos, *small_tokenizer().encode("a <|bos|> b")]


def test_a_classifier_scores_the_last_token(exported: Folder) -> None:
    load_classifier = transformers.AutoModelForSequenceClassification.from_pretrained
    model = load_classifier(exported(DEFAULT), num_labels=3)
    found = model(tokens(), labels=torch.tensor([0, 1, 2]))
    assert_near(found.logits, model.score(model.model(tokens()).last_hidden_state[:, -1]))
    found.loss.backward()


@pytest.mark.parametrize("name", [OURS, "default, expert_choice", "default, token_choice"])
def test_greedy_generation_writes_our_tokens_alone_and_left_padded(exported: Folder, name: str) -> None:
    model, tokenizer = load(exported(name)), transformers.AutoTokenizer.from_pretrained(exported(name))
    reference, our_tokenizer = ours(exported(name)), small_tokenizer()
    expected = [[s.token for s in generate(reference, our_tokenizer, p, max_tokens=8, temperature=0)] for p in PROMPTS]
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True, split_special_tokens=True)
    together = model.generate(**batch, max_new_tokens=8, do_sample=False)
    for prompt, row, written in zip(PROMPTS, together, expected, strict=True):
        ids = torch.tensor([[our_tokenizer.bos, *our_tokenizer.encode(prompt)]])
        alone = model.generate(ids, max_new_tokens=8, do_sample=False)[0]
        assert alone.tolist() == [*ids[0].tolist(), *written]
        assert row[batch.input_ids.shape[1] :][: len(written)].tolist() == written


def test_under_autocast_a_static_cache_gives_the_same_logits(exported: Folder) -> None:
    """Regression: its keys and values differed in dtype."""
    model = load(exported(OURS))
    options = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = (
            model.generate(tokens()[:2, :20], cache_implementation=kind, disable_compile=True, **options)
            for kind in (None, "static")
        )
    assert_near(found.logits[0], expected.logits[0], 0.05)


@torch.no_grad()
def test_hidden_states_are_returned_and_attentions_where_they_are_computed(exported: Folder) -> None:
    """Regression: both were silently None."""
    model = load(exported(OURS))
    output = model(tokens(), output_hidden_states=True)
    states = output.hidden_states
    assert len(states) == model.config.layers + 1
    cap = model.config.final_logit_softcapping
    torch.testing.assert_close(cap * torch.tanh(model.lm_head(states[-1]) / cap), output.logits)
    embedded = model.model.embed(tokens())
    torch.testing.assert_close(states[0], torch.nn.functional.rms_norm(embedded, embedded.shape[-1:]))
    options = {"output_hidden_states": True, "return_dict_in_generate": True, "eos_token_id": None}
    written = model.generate(tokens(), max_new_tokens=2, **options)
    assert [len(step) for step in written.hidden_states] == [model.config.layers + 1] * 2
    assert model(tokens()).hidden_states is None
    model.set_attn_implementation("eager")
    assert [each.shape for each in model(tokens(), output_attentions=True).attentions] == [(3, 2, 40, 40)] * 3


def test_what_a_configuration_leaves_out_is_as_in_our_models() -> None:
    sections, theirs = GPTConfig(rule=None).to_dict(), transformers.AutoConfig.for_model("expert_threshold")
    ours = {**sections["model"], "rule": sections["rule"]}
    assert {name: getattr(theirs, name) for name in ours} == ours


def run_without_package(program: str, folder: Path) -> None:
    """Run Python in the folder, without this package, the network, or anybody to answer questions."""
    program = 'import sys; sys.modules["expert_threshold"] = None\n' + textwrap.dedent(program)
    environment = os.environ | {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, timeout=280, env=environment, cwd=folder,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "[y/N]" not in done.stdout


@torch.no_grad()
def test_a_folder_loads_alone_with_its_own_code_as_its_card_says(folder: Path, tmp_path: Path) -> None:
    """The card's example runs as pasted where the package cannot be imported, and asks no question."""
    (example,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    shutil.copytree(folder, tmp_path / folder.name)
    program = f"""
        {textwrap.indent(example, " " * 8).strip()}
        import torch
        assert type(model).__module__.startswith("transformers_modules"), type(model)
        torch.save(model(**tokenizer("the cat sat", return_tensors="pt")).logits, "logits.pt")
        model.save_pretrained("saved")
    """
    run_without_package(program, tmp_path)
    ids = torch.tensor([[269, *small_tokenizer().encode("the cat sat")]])
    assert_near(torch.load(tmp_path / "logits.pt"), ours(folder)(ids).logits)
    assert (tmp_path / "saved" / "modeling_expert_threshold.py").is_file()  # so that what is saved loads alone, too
    assert not list(folder.glob("expert_threshold*"))  # would shadow the package for Python started in the folder


def test_a_model_is_pushed_with_its_code(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the code was written only after the upload."""
    pushed: list[str] = []

    def upload(self: Any, folder: Path, repo_id: str, before: dict[str, float], **_: Any) -> None:
        pushed.extend(path.name for path in Path(folder).iterdir() if path.name not in before)

    model = load(folder)
    for name in ("hf_api", "create_and_tag_model_card"):  # no network, no card
        monkeypatch.setattr(transformers.modeling_utils, name, mock.MagicMock())
    monkeypatch.setattr(type(model), "_upload_modified_files", upload)
    model.save_pretrained(tmp_path / "saved", push_to_hub=True)
    code = {"modeling_expert_threshold.py", "exported_rule.py", "routing_expert_threshold.py", "option.py"}
    assert code | {"config.json", "model.safetensors"} <= set(pushed)


@torch.no_grad()
def test_each_folder_in_one_process_has_its_own_code(exported: Folder, tmp_path: Path) -> None:
    """Regression: a second folder's operators had the names of the first's, whose next call crashed."""
    folders = [exported(name) for name in ("paper's, token_choice", DEFAULT, "trend", "paper's, foreign", "dense")]
    program = f"""
        import torch
        from transformers import AutoModelForCausalLM
        for name in {[folder.name for folder in folders]}:
            model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).eval()
            assert f".{{name}}." in type(model).__module__, type(model)
            torch.save(model(torch.arange(40)[None]).logits, f"{{name}}.pt")
        from torch._library.custom_ops import CustomOpDef
        every = [each for module in sys.modules.values() if module for each in vars(module).values()]
        operators = {{each for each in every if isinstance(each, CustomOpDef)}}
        assert len(operators) == len({{each._qualname for each in operators}}) > 2, operators
    """
    for folder in folders:
        shutil.copytree(folder, tmp_path / folder.name)
    run_without_package(program, tmp_path)
    for folder in folders:
        assert_near(torch.load(tmp_path / f"{folder.name}.pt"), ours(folder)(torch.arange(40)[None]).logits)


@pytest.mark.parametrize("rule", ["paper's, token_choice", DEFAULT, "trend"])
def test_saving_and_loading_and_importing_give_the_same_model(exported: Folder, rule: str, tmp_path: Path) -> None:
    model = load(exported(rule))
    assert all(bool(value.any()) for name, value in model.named_buffers() if rule == "trend")
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert (tmp_path / "saved" / "modeling_expert_threshold.py").is_file()  # so that what is saved loads alone, too
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    transformers.AutoTokenizer.from_pretrained(exported(rule)).save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.config.to_dict() == model.config.to_dict() | {"_name_or_path": again.config.name_or_path}
    imported, tokenizer = load_model(import_folder(tmp_path / "saved", tmp_path / "run").path)
    assert tokenizer.encode("the cat") == small_tokenizer().encode("the cat")
    expected = ours(exported(rule)).state_dict()
    for name, value in imported.state_dict().items():
        assert torch.equal(value, expected[name])
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


@pytest.mark.parametrize("rule", [OURS, "loss_free"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_no_dtype_changes_the_rule_s_state(exported: Folder, rule: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Regression: the counter of steps, an integer, became float32 and was saved as such."""
    expected = routers(load(exported(rule)))
    state = {name: value for name, value in expected.items() if "state_" in name}
    loaded = load(exported(rule), dtype=dtype)
    assert loaded.dtype == dtype
    assert_same_routers(loaded, expected)
    if dtype == torch.bfloat16:
        distance = (loaded(tokens()).logits - ours(exported(rule), dtype)(tokens()).logits).abs()
        assert float(distance.quantile(0.9)) < 0.1  # rounding sends a few tokens elsewhere
    loaded.save_pretrained(tmp_path / "saved")
    transformers.AutoTokenizer.from_pretrained(exported(rule)).save_pretrained(tmp_path / "saved")
    for again in (load(tmp_path / "saved"), load(tmp_path / "saved", dtype=torch.float32)):
        assert_same_routers(again, expected)
    run = import_folder(tmp_path / "saved", tmp_path / "run")
    saved = run.load_checkpoint().tensors["model"]
    assert_same_routers(saved, {name.removeprefix("model."): value for name, value in expected.items()})
    assert_same_routers(load(exported(rule)).to(dtype), state)
    fresh = transformers.AutoModelForCausalLM.from_config(loaded.config, dtype=dtype)
    assert {name: value.dtype for name, value in routers(fresh).items()} == {n: v.dtype for n, v in expected.items()}


def routers(model: Any) -> dict[str, torch.Tensor]:
    """Their weights and state; of a model, or of a state dict."""
    named = model if isinstance(model, dict) else model.state_dict()
    return {name: value for name, value in named.items() if "router" in name}


def assert_same_routers(model: Any, expected: dict[str, torch.Tensor]) -> None:
    """Assert that values and dtypes are those expected."""
    found = routers(model)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@torch.no_grad()
def test_device_maps_place_the_model_whole_or_in_parts(folder: Path, tmp_path: Path) -> None:
    expected = load(folder)(tokens()).logits
    torch.testing.assert_close(load(folder, device_map="auto")(tokens()).logits, expected, rtol=1e-5, atol=1e-5)
    parts = {"model.embed": "cpu", "model.blocks.0": "cpu", "model.blocks.1": "disk", "model.blocks.2": "disk"}
    placed = load(folder, device_map=parts | {"lm_head": "cpu"}, offload_folder=str(tmp_path))
    torch.testing.assert_close(placed(tokens()).logits, expected, rtol=1e-5, atol=1e-5)


def train(model: Any, path: Path, optimizer: torch.optim.Optimizer | None = None) -> float:
    """Eight steps on one text; their mean loss."""
    data = [{"input_ids": row, "labels": row} for row in tokens(4)]
    arguments = transformers.TrainingArguments(
        output_dir=str(path), max_steps=8, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
        learning_rate=1e-2, logging_steps=8, save_strategy="no", report_to=[], disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    return float(trainer.train().metrics["train_loss"])


def test_trainer_fine_tunes_the_weights_and_leaves_the_cutoffs(folder: Path, tmp_path: Path) -> None:
    model = load(folder)
    before = state(model)
    with torch.no_grad():
        first = float(model(tokens(4), labels=tokens(4)).loss)
    model.activation_checkpointing_enable()
    assert train(model, tmp_path) < first
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == ("state_" in name), name


@pytest.mark.parametrize("rule", [OURS, "trend"])
def test_follow_moves_the_cutoffs_in_the_trainer(exported: Folder, rule: str, tmp_path: Path) -> None:
    model = load(exported(rule))
    before = state(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    follow(model, optimizer)
    train(model, tmp_path, optimizer)
    assert model.state_dict().keys() == before.keys()
    for name, value in model.state_dict().items():
        stays = name.endswith("state_weight") if rule == "trend" else name.endswith("state_slope")
        assert torch.equal(value, before[name]) == stays, name
    steps = [value for name, value in model.named_buffers() if name.endswith("step")]
    assert [int(step) for step in steps] == [4 + 8] * 2
    model.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(load(tmp_path / "saved")(tokens()).logits, model.eval()(tokens()).logits)


@pytest.fixture
def alone() -> Iterator[None]:
    """The process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrap", [lambda model: model, DistributedDataParallel, fully_shard], ids=["", "ddp", "fsdp2"])
@pytest.mark.usefixtures("alone")
def test_follow_adds_the_losses_that_pre_training_had(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    """No loop of transformers has a place to add them."""
    rule = TokenChoice(4, 1, balance="aux", aux_strength=0.1)
    write_run(tmp_path / "run-aux", small_model(rule, z_loss=0.01))
    export_run(tmp_path / "run-aux", tmp_path / "aux")
    model, reference = load(tmp_path / "aux").train(), ours(tmp_path / "aux").train()
    model = wrap(model)
    follow(model, torch.optim.SGD(model.parameters(), 0.1))
    text = tokens()
    model(text, labels=text).loss.backward()
    reference(text, torch.nn.functional.pad(text[:, 1:], (0, 1), value=-1)).loss.backward()  # the last has no target
    found = [p.grad for name, p in model.named_parameters() if name.endswith("router.weight")]
    found = [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient for gradient in found]
    for (_, moe), gradient in zip(reference.moe_layers(), found, strict=True):
        torch.testing.assert_close(gradient, moe.router.weight.grad, rtol=1e-3, atol=1e-5)


def test_follow_takes_no_padding(folder: Path) -> None:
    model = load(folder).train()
    follow(model, torch.optim.SGD(model.parameters(), 0.1))
    mask = torch.ones_like(tokens())
    model(tokens(), attention_mask=mask)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="attention_mask contains padding, which would bias the cutoffs"):
        model(tokens(), attention_mask=mask)
    model.eval()(tokens(), attention_mask=mask)


@pytest.mark.parametrize("trunk", [{}, TRUNK], ids=["paper", "nanochat"])
def test_a_model_made_by_configuration_starts_as_ours(trunk: dict[str, Any]) -> None:
    rule = {"name": "expert_threshold", "num_experts": 4, "experts_per_token": 1, "debias": True}
    sizes = {"layers": 2, "d_model": 64, "heads": 2, "kv_heads": 2, "d_expert": 32, "d_feed_forward": 64}
    options = {"vocab_size": 270, "context": 64, "rule": rule} | sizes | trunk
    config = transformers.AutoConfig.for_model("expert_threshold", **options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert config.num_hidden_layers == 2
    reference = small_model(ExpertThreshold(4), context=64, **sizes, **trunk)
    reference.init_weights()
    for name, weight in reference.state_dict().items():
        name = re.sub(r"(experts\.\w+)$", r"\1_proj", name)
        theirs = model.state_dict()["lm_head.weight" if name == "head.weight" else f"model.{name}"]
        assert theirs.shape == weight.shape
        if weight.is_floating_point() and weight.numel() > 1:
            near = 0.1 if weight.numel() > 99 else 0.5
            assert float(theirs.std()) == pytest.approx(float(weight.std()), rel=near), name

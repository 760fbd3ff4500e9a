"""The exported model in Hugging Face transformers: the same numbers, wherever and however it is loaded."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cases import NULL_SCORES, RULES, small_model, small_tokenizer, write_run
from expert_threshold.generate import generate
from expert_threshold.integrations.export import export_run, import_folder
from expert_threshold.integrations.follow import follow
from expert_threshold.model import GPT, TRUNKS, GPTConfig
from expert_threshold.routing import ExpertThreshold, TokenChoice
from expert_threshold.runs import load_model
from processes import run_python

# Its classes are imported on first use, which takes seconds, rather than by every worker that collects tests.
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
if find_spec("accelerate") is None:
    pytest.skip("needs accelerate: pip install -e '.[hf]'", allow_module_level=True)

OPTIONS = {"token_choice": {"activation": "swiglu", "shared_experts": 0, "softcap": None}}
OPTIONS |= {"expert_choice": {"kv_heads": 1, "gate_norm": "fanout", "dense_layers": 0}}
TRUNK = TRUNKS["nanochat"] | {"key_offset": "all", "windows": "SL", "short_window": 5}
CACHED = {"smear": False, "key_offset": None}
OPTIONS |= {"trunk": TRUNK, "cached_trunk": TRUNK | CACHED | {"kv_heads": 1, "value_embeddings": "all"}}
MODELS = RULES | {
    "trend": ExpertThreshold(4, 1, warmup_steps=2, decay=0.5, estimator="trend"),
    "null_scores": NULL_SCORES,
    "trunk": RULES["expert_threshold"],
    "cached_trunk": RULES["expert_threshold"],
}
PROMPTS = ["the cat sat", "hat", "the mat; the hat of the <|bos|> cat"]


@pytest.fixture(autouse=True, scope="module")
def ready() -> Iterator[None]:
    """Register our model, and show no progress."""
    import expert_threshold.integrations.transformers  # noqa: F401

    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of every rule, exported."""
    path = tmp_path_factory.mktemp("folders")
    for name, rule in MODELS.items():
        write_run(path / f"run-{name}", small_model(rule, **OPTIONS.get(name, {})))
        export_run(path / f"run-{name}", path / name)
    return {name: path / name for name in MODELS}


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path]) -> Path:
    return folders["expert_threshold"]


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def ours(folder: Path, dtype: torch.dtype = torch.float32) -> GPT:
    return load_model(folder.with_name(f"run-{folder.name}"), compute_dtype=dtype)[0]


def tokens(batch: int = 3, time: int = 40) -> torch.Tensor:
    return torch.randint(269, (batch, time), generator=torch.Generator().manual_seed(0))


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("rule", MODELS)
@torch.no_grad()
def test_logits_equal_ours(folders: dict[str, Path], rule: str) -> None:
    model, told = load(folders[rule], output_loading_info=True)
    assert not any(told.values()), told
    assert model.dtype == torch.float32
    torch.testing.assert_close(model(tokens()).logits, ours(folders[rule])(tokens()).logits, rtol=1e-5, atol=1e-5)
    assert model(tokens(), logits_to_keep=2).logits.shape == (3, 2, 270)
    body = transformers.AutoModel.from_pretrained(folders[rule])
    torch.testing.assert_close(
        body(tokens()).last_hidden_state, model.model(tokens()).last_hidden_state, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("rule", [*RULES, "null_scores", "trunk"])
def test_loss_and_gradients_equal_ours_under_frozen_routing(folders: dict[str, Path], rule: str) -> None:
    model, reference = load(folders[rule]).train(), ours(folders[rule])
    targets = torch.cat((tokens()[:, 1:], torch.full((3, 1), -1)), 1)
    expected = reference(tokens(), targets)
    loss = model(tokens(), labels=tokens()).loss
    torch.testing.assert_close(loss, expected.cross_entropy, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.loss.backward()
    gradients = {name.removeprefix("model.").replace("lm_head", "head"): w.grad for name, w in model.named_parameters()}
    for name, weight in reference.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rule", ["token_choice", "expert_choice", "expert_threshold", "trunk", "cached_trunk"])
def test_greedy_generation_with_the_cache_writes_our_tokens_alone_and_left_padded(
    folders: dict[str, Path], rule: str
) -> None:
    model, tokenizer = load(folders[rule]), transformers.AutoTokenizer.from_pretrained(folders[rule])
    reference, our_tokenizer = ours(folders[rule]), small_tokenizer()
    expected = [[s.token for s in generate(reference, our_tokenizer, p, max_tokens=8, temperature=0)] for p in PROMPTS]
    alone = [model.generate(**tokenizer(p, return_tensors="pt"), max_new_tokens=8, do_sample=False)[0] for p in PROMPTS]
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    together = model.generate(**batch, max_new_tokens=8, do_sample=False)
    for prompt, out, row, written in zip(PROMPTS, alone, together, expected, strict=True):
        length = len(our_tokenizer.encode(prompt)) + 1
        assert out.tolist() == [our_tokenizer.bos, *our_tokenizer.encode(prompt), *written]
        assert row[batch.input_ids.shape[1] :][: len(written)].tolist() == written
        assert row[batch.input_ids.shape[1] - length :][: len(out)].tolist() == out.tolist()
    without = model.generate(**batch, max_new_tokens=8, do_sample=False, use_cache=False)
    assert torch.equal(without, together)


@pytest.mark.parametrize(("rule", "autocast"), [("expert_threshold", True), ("cached_trunk", False)])
def test_a_static_cache_gives_the_same_logits(folders: dict[str, Path], rule: str, autocast: bool) -> None:
    """Regression: its masks ignored windows, and under autocast its keys and values differed in dtype."""
    model = load(folders[rule])
    mask = torch.tensor([[0] * 5 + [1] * 15, [1] * 20])
    options = {"attention_mask": mask, "max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
    options |= {"return_dict_in_generate": True, "output_logits": True, "disable_compile": True}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, found = (
            model.generate(tokens()[:2, :20], **options, cache_implementation=kind) for kind in (None, "static")
        )
    near = 0.05 if autocast else 1e-4
    for step in range(
        1 if autocast else 2
    ):  # rounded logits may choose other tokens, from which all that follows differs
        torch.testing.assert_close(found.logits[step], expected.logits[step], rtol=near, atol=near)


def test_models_with_windows_refuse_prepared_masks(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="give one of this shape"):
        load(folders["cached_trunk"])(tokens(), attention_mask=torch.ones(3, 1, 40, 40, dtype=torch.bool))


@torch.no_grad()
def test_hidden_states_are_returned_and_attentions_refused(folder: Path) -> None:
    """Regression: both were silently None."""
    model = load(folder)
    output = model(tokens(), output_hidden_states=True)
    states = output.hidden_states
    assert len(states) == model.config.layers + 1
    cap = model.config.softcap
    torch.testing.assert_close(cap * torch.tanh(model.lm_head(states[-1]) / cap), output.logits)
    torch.testing.assert_close(
        states[0], torch.nn.functional.rms_norm(model.model.embed(tokens()), states[0].shape[-1:])
    )
    written = model.generate(
        tokens(), max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True, eos_token_id=None
    )
    assert [len(step) for step in written.hidden_states] == [model.config.layers + 1] * 2
    assert model(tokens()).hidden_states is None
    with pytest.raises(ValueError, match="output_attentions=True"):
        model(tokens(), output_attentions=True)


def test_what_a_configuration_leaves_out_is_as_in_our_models() -> None:
    ours, theirs = GPTConfig(rule=None).to_dict(), transformers.AutoConfig.for_model("expert_threshold")
    assert {name: getattr(theirs, name) for name in ours} == ours


@pytest.mark.parametrize("rule", ["expert_threshold", "trunk"])
@torch.no_grad()
def test_left_padding_changes_no_logits(folders: dict[str, Path], rule: str) -> None:
    model = load(folders[rule])
    mask = torch.tensor([[0] * 5 + [1] * 35, [1] * 40, [0] * 39 + [1]])
    padded = model(tokens(), attention_mask=mask).logits
    for row, ids, logits in zip(mask.bool(), tokens(), padded, strict=True):
        torch.testing.assert_close(logits[row], model(ids[row][None]).logits[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_folder_loads_alone_with_its_own_code_as_its_card_says(folder: Path, tmp_path: Path) -> None:
    """The card's example runs as pasted where the package cannot be imported, and asks no question."""
    [(_, example)] = blocks((folder / "README.md").read_text())
    shutil.copytree(folder, tmp_path / folder.name)
    program = f"""
        import sys
        sys.modules["expert_threshold"] = None
        {textwrap.indent(example, " " * 8).strip()}
        import torch
        assert type(model).__module__.startswith("transformers_modules"), type(model)
        torch.save(model(**tokenizer("the cat sat", return_tensors="pt")).logits, "logits.pt")
        model.save_pretrained("saved")
    """
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(
        command, check=False, timeout=280, env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "[y/N]" not in done.stdout
    ids = torch.tensor([[269, *small_tokenizer().encode("the cat sat")]])
    logits = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(logits, ours(folder)(ids).logits, rtol=1e-5, atol=1e-5)
    assert (tmp_path / "saved" / "modeling_expert_threshold.py").is_file()  # so that what is saved loads alone, too


def test_no_exported_file_shadows_the_package(folder: Path) -> None:
    """Regression: the rule's file, expert_threshold.py, shadowed the package for Python started in the folder."""
    assert list(folder.glob("routing_expert_threshold.py"))
    assert not list(folder.glob("expert_threshold*"))


def test_a_model_is_pushed_with_its_code(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the code was written only after the upload."""

    class Hub:
        def create_repo(self, repo_id: str, **_: Any) -> Any:
            return SimpleNamespace(repo_id=repo_id)

    pushed: list[str] = []

    def upload(self: Any, folder: Path, repo_id: str, before: dict[str, float], **_: Any) -> None:
        pushed.extend(path.name for path in Path(folder).iterdir() if path.name not in before)

    model = load(folder)
    monkeypatch.setattr(transformers.modeling_utils, "hf_api", Hub)
    monkeypatch.setattr(transformers.modeling_utils, "create_and_tag_model_card", lambda *_, **__: Card())
    monkeypatch.setattr(type(model), "_upload_modified_files", upload)
    model.save_pretrained(tmp_path / "saved", push_to_hub=True)
    code = {"modeling_expert_threshold.py", "exported_rule.py", "routing_expert_threshold.py", "option.py"}
    assert code | {"config.json", "model.safetensors"} <= set(pushed)


class Card:
    """A model card that writes no file."""

    def save(self, path: str) -> None:
        pass


@torch.no_grad()
def test_each_folder_in_one_process_has_its_own_code(folders: dict[str, Path], tmp_path: Path) -> None:
    names = ["token_choice", "expert_threshold", "expert_choice", "dense"]
    program = f"""
        import sys
        sys.modules["expert_threshold"] = None
        import torch
        from transformers import AutoModelForCausalLM
        for name in {names}:
            model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).eval()
            assert f".{{name}}." in type(model).__module__, type(model)
            torch.save(model(torch.arange(40)[None]).logits, f"{{name}}.pt")
    """
    for name in names:
        shutil.copytree(folders[name], tmp_path / name)
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(
        command, check=False, timeout=280, env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for name in names:
        expected = ours(folders[name])(torch.arange(40)[None]).logits
        torch.testing.assert_close(torch.load(tmp_path / f"{name}.pt"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", ["token_choice", "expert_threshold", "trend"])
def test_saving_and_loading_and_importing_give_the_same_model(
    folders: dict[str, Path], rule: str, tmp_path: Path
) -> None:
    model = load(folders[rule])
    assert all(bool(value.any()) for name, value in model.named_buffers() if rule == "trend")
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert (tmp_path / "saved" / "modeling_expert_threshold.py").is_file()  # so that what is saved loads alone, too
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    transformers.AutoTokenizer.from_pretrained(folders[rule]).save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.config.to_dict() == model.config.to_dict() | {"_name_or_path": again.config.name_or_path}
    imported, tokenizer = load_model(import_folder(tmp_path / "saved", tmp_path / "run").path)
    assert tokenizer.encode("the cat") == small_tokenizer().encode("the cat")
    expected = ours(folders[rule]).state_dict()
    for name, value in imported.state_dict().items():
        assert torch.equal(value, expected[name])
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


@pytest.mark.parametrize("rule", ["expert_threshold", "loss_free"])
@torch.no_grad()
def test_in_bfloat16_routers_and_their_state_keep_their_dtypes(folders: dict[str, Path], rule: str) -> None:
    """The counter of steps, an integer, once became float32 and was saved as such."""
    model, expected = load(folders[rule], dtype=torch.bfloat16), routers(load(folders[rule]))
    assert model.dtype == torch.bfloat16
    assert_same_routers(model, expected)
    logits = ours(folders[rule], torch.bfloat16)(tokens()).logits
    distance = (model(tokens()).logits - logits).abs()  # rounding sends a few tokens elsewhere
    assert float(distance.quantile(0.9)) < 0.1


@pytest.mark.parametrize("rule", ["expert_threshold", "loss_free"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_no_dtype_of_the_weights_changes_the_rule_s_state(
    folders: dict[str, Path], rule: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    expected = routers(load(folders[rule]))
    state = {name: value for name, value in expected.items() if "state_" in name}
    loaded = load(folders[rule], dtype=dtype)
    assert_same_routers(loaded, expected)
    loaded.save_pretrained(tmp_path / "saved")
    transformers.AutoTokenizer.from_pretrained(folders[rule]).save_pretrained(tmp_path / "saved")
    for again in (load(tmp_path / "saved"), load(tmp_path / "saved", dtype=torch.float32)):
        assert_same_routers(again, expected)
    run = import_folder(tmp_path / "saved", tmp_path / "run")
    saved = run.load_checkpoint().tensors["model"]
    assert_same_routers(saved, {name.removeprefix("model."): value for name, value in expected.items()})
    assert_same_routers(load(folders[rule]).to(dtype), state)
    fresh = transformers.AutoModelForCausalLM.from_config(loaded.config, dtype=dtype)
    assert {name: value.dtype for name, value in routers(fresh).items()} == {n: v.dtype for n, v in expected.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_whose_counter_was_saved_as_a_number_is_read_as_a_counter(
    folder: Path, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Earlier versions saved a model that was loaded in bfloat16 so."""
    expected = routers(load(folder))
    shutil.copytree(folder, tmp_path / "saved")
    weights = load_file(folder / "model.safetensors")
    weights |= {name: value.float() for name, value in weights.items() if name.endswith("state_step")}
    save_file(weights, tmp_path / "saved" / "model.safetensors", {"format": "pt"})
    assert_same_routers(load(tmp_path / "saved", dtype=dtype), expected)
    saved = import_folder(tmp_path / "saved", tmp_path / "run").load_checkpoint().tensors["model"]
    assert_same_routers(saved, {name.removeprefix("model."): value for name, value in expected.items()})


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


def blocks(page: str) -> list[tuple[str, str]]:
    """The shell and Python blocks of a page, in order, each with its kind."""
    found = re.findall(r"```python\n(.*?)```|((?:^    [^\n]*\n)+)", page, re.M | re.S)
    return [("python", python) if python else ("shell", textwrap.dedent(shell)) for python, shell in found]


def test_every_block_of_the_page_runs_as_pasted(tmp_path: Path) -> None:
    """Runs them in order in a fresh folder. Loading the tokenizer once asked whether to trust the folder's code."""
    write_run(tmp_path / "runs/first", small_model())
    page = blocks((Path(__file__).parents[2] / "docs/huggingface.md").read_text())
    assert [kind for kind, _ in page] == ["shell", "python", "python", "shell"]
    # Blocks of Python that follow each other are one session.
    train, export = page[0][1].splitlines()
    assert train.endswith("--out runs/first")
    run_alone(tmp_path, *as_module(export))
    run_alone(tmp_path, "-c", page[1][1] + page[2][1])
    for line in page[3][1].splitlines():
        run_alone(tmp_path, *as_module(line))
    assert (tmp_path / "runs/again/config.json").is_file()


def as_module(line: str) -> list[str]:
    """The arguments of Python that do what the line of one `et` command does."""
    command, *arguments = shlex.split(line)
    assert command == "et", line
    return ["-m", "expert_threshold", *arguments]


def run_alone(folder: Path, *arguments: str) -> None:
    """Run Python in that folder, where nobody answers questions and no network is."""
    told = run_python(*arguments, environment={"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}, cwd=folder)
    assert "[y/N]" not in told  # a question goes unanswered, and transformers then helps itself


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


@pytest.mark.parametrize("rule", ["expert_threshold", "trend"])
def test_follow_moves_the_cutoffs_in_the_trainer(folders: dict[str, Path], rule: str, tmp_path: Path) -> None:
    model = load(folders[rule])
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
    with pytest.raises(ValueError, match="attention_mask has padding, which would move the cutoffs"):
        model(tokens(), attention_mask=mask)
    model.eval()(tokens(), attention_mask=mask)


@pytest.mark.parametrize("trunk", [{}, TRUNK], ids=["paper", "nanochat"])
def test_a_model_made_by_configuration_begins_as_ours(trunk: dict[str, Any]) -> None:
    rule = {"name": "expert_threshold", "num_experts": 4, "experts_per_token": 1, "debias": True}
    sizes = {"layers": 2, "d_model": 64, "heads": 2, "kv_heads": 2, "d_expert": 32, "d_feed_forward": 64}
    options = {"vocab_size": 270, "context": 64, "rule": rule} | sizes | trunk
    config = transformers.AutoConfig.for_model("expert_threshold", **options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert config.num_hidden_layers == 2
    reference = small_model(ExpertThreshold(4), context=64, **sizes, **trunk)
    reference.init_weights()
    for name, weight in reference.state_dict().items():
        theirs = model.state_dict()[name.replace("head.", "lm_head.") if name == "head.weight" else f"model.{name}"]
        assert theirs.shape == weight.shape
        if weight.is_floating_point() and weight.numel() > 1:
            assert float(theirs.std()) == pytest.approx(float(weight.std()), rel=0.1 if weight.numel() > 99 else 0.5), (
                name
            )

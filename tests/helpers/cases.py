"""Cases and small models for many tests: rules, models, run folders, inputs of backends, a step on a GPU."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import pyarrow
import torch
from pyarrow import parquet
from torch import Tensor

from commands import write_lines
from expert_threshold.cli import main, train
from expert_threshold.cli.run_options import parse_run, resolve_run
from expert_threshold.config import RunConfig
from expert_threshold.data import Tokenizer, open_source
from expert_threshold.model import GPT, TRUNKS, GPTConfig
from expert_threshold.moe.backends.static import on_hopper
from expert_threshold.routing import ExpertChoice, ExpertThreshold, Rule, TokenChoice
from expert_threshold.runs import RunFolder

RULES: dict[str, Rule | None] = {
    "dense": None,
    "token_choice": TokenChoice(4, 2),
    "loss_free": TokenChoice(4, 1, balance="loss_free"),
    "expert_choice": ExpertChoice(4, 1, pool="batch"),
    "expert_threshold": ExpertThreshold(4, 1, warmup_steps=2),
}
"""Each way to route in inference."""

NULL_SCORES = ExpertThreshold(4, 1, warmup_steps=2, gate="softmax", null_scores=3)
"""A rule whose router computes more scores than there are experts."""

TRAINED: dict[str, Rule | None] = RULES | {
    "token_choice_aux": TokenChoice(4, 1, balance="aux"),
    "expert_choice_sequence": ExpertChoice(4, 2, pool="sequence", decay=0.5),
}
"""And each way to route in training: with a loss of the rule's own, by pools of a sequence."""

PIECES: dict[str, dict[str, Any]] = {
    "value embeddings, alternating": {"value_embeddings": "alternate"},
    "value embeddings, all": {"value_embeddings": "all"},
    "residual scalars": {"residual_scalars": True},
    "skip scalars": {"skip_scalars": True},
    "smear": {"smear": True},
    "backout": {"backout": True},
    "sharper attention": {"qk_scale": 1.2},
    "rotary base": {"rotary_base": 100_000.0},
    "key offset": {"key_offset": "all"},
    "key offset in the last layer": {"key_offset": "last"},
    "windows": {"windows": "SL", "short_window": 3},
    "all of them": TRUNKS["nanochat"] | {"key_offset": "all", "windows": "SSL", "short_window": 3},
}
"""Each piece of the trunk beside the paper's, and all together, short of sight."""

TEXT = "the cat sat on the mat; the hat of the cat\n"


Options = TypeVar("Options", bound=tuple[Hashable, ...])


def covering(cases: Iterable[Options], size: int = 2) -> list[Options]:
    """Choose few of the cases, in which every pair of options that occurs in any case occurs too.

    An option is a place in the tuple and its value there. size: 1 for every option by itself.
    """
    sets = {case: set(combinations(enumerate(case), size)) for case in cases}
    left, chosen = set().union(*sets.values()), []
    while left:
        chosen.append(max(sets, key=lambda case: len(sets[case] & left)))
        left -= sets[chosen[-1]]
    return chosen


def et(*arguments: object) -> int:
    """Run a command in this process and return its exit code."""
    return main([str(argument) for argument in arguments])


def said(*arguments: object) -> str:
    """Run a command, which must succeed, and return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert et(*arguments) == 0
    return printed.getvalue()


def resolved(line: str) -> RunConfig:
    """Return the run that the options in `line` describe."""
    return resolve_run(parse_run("et train", "", train.OPTIONS, line.split()))


# Models and run folders.


def small_tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT * 4], 270)


def small_config(rule: Rule | None = RULES["expert_threshold"], **changes: Any) -> GPTConfig:
    sizes = {"vocab_size": 270, "context": 64, "layers": 3, "d_model": 32, "heads": 2, "kv_heads": 2}
    return GPTConfig(**({"d_expert": 16, "d_feed_forward": 64, "rule": rule} | sizes | changes))


def small_model(
    rule: Rule | None = RULES["expert_threshold"], *, seed: int = 0, steps: int = 4, dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> GPT:  # fmt: skip
    """Return a small model in evaluation mode, no weight of it zero. changes: options of GPTConfig.

    steps: batches that its rule has seen. dtype: the compute dtype.
    """
    torch.manual_seed(seed)
    model = GPT(small_config(rule, **changes), compute_dtype=dtype)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    for _ in range(steps):
        tokens = torch.randint(model.config.vocab_size, (2, min(model.config.context, 32)))
        model.update_rules(model(tokens).observations)
    return model.eval()


def write_text(path: Path, text: str = TEXT, *, documents: int = 30, words: int = 100) -> Path:
    """A corpus in a .jsonl file, of this text's words in other orders.

    By default it has some 9,000 tokens of `small_tokenizer`, a tenth of them for validation.
    """
    some = text.split()
    texts = [" ".join(some[(i * j) % len(some)] for j in range(words)) for i in range(1, documents + 1)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_shards(folder: Path, texts: Sequence[str], shards: int = 3, row_group_size: int = 10) -> Path:
    """A folder of shard_0.parquet and so on, each with its part of the texts in a column `text`."""
    folder.mkdir(parents=True, exist_ok=True)
    size = len(texts) // shards
    for shard in range(shards):
        table = pyarrow.table({"text": texts[shard * size : (shard + 1) * size]})
        parquet.write_table(table, folder / f"shard_{shard}.parquet", row_group_size=row_group_size)
    return folder


def write_bundle(path: Path, tasks: dict[str, tuple[str, int, float, list[dict[str, Any]]]]) -> Path:
    """A CORE bundle. tasks: kind, solved examples, baseline in percent and rows of each."""
    (path / "eval_data").mkdir(parents=True)
    core, baselines = "icl_tasks:\n", "Eval Task,Random baseline\n"
    for name, (kind, shots, baseline, rows) in tasks.items():
        core += f"- {{label: {name}, dataset_uri: {name}.jsonl, num_fewshot: [{shots}], icl_task_type: {kind}}}\n"
        baselines += f"{name},{baseline}\n"
        write_lines(path / "eval_data" / f"{name}.jsonl", rows)
    (path / "core.yaml").write_text(core)
    (path / "eval_meta_data.csv").write_text(baselines)
    return path


def write_run(path: Path, model: GPT, step: int = 4, text: Path | None = None) -> RunFolder:
    """The model's weights as a checkpoint, with a validation of it in the metrics; text: what it was trained on."""
    run = RunFolder.create(path)
    train = {"batch_size": 2, "accumulation": 1}
    corpus = {"name": "/somewhere/corpus.jsonl", "hash": "0" * 64, "bytes": 1}
    if text is not None:
        opened = open_source(str(text))
        corpus = {"name": str(text), "hash": opened.hash, "bytes": opened.bytes}
    run.write_config({**model.config.to_dict(), "train": train, "data": {"source": corpus["name"]}, "corpus": corpus})
    small_tokenizer().save(run.tokenizer_path)
    run.metrics.append({"step": step, "split": "validation", "loss": 5.25, "bits_per_byte": 3.5})
    run.save_checkpoint(step, {"model": model.state_dict()}, {})
    return run


# A step, called or captured in a CUDA graph.

GPU_RULES: dict[str, Rule | None] = {
    "dense": None,
    "expert_threshold": ExpertThreshold(8, warmup_steps=1),
    "expert_choice": ExpertChoice(8, pool="sequence"),
    "token_choice": TokenChoice(8, 2),
}


def model_and_batch(
    rule: Rule | None, dispatch: str, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> tuple[GPT, Tensor, Tensor]:
    sizes = {"vocab_size": 256, "d_model": 64, "d_expert": 128, "d_feed_forward": 256}
    model = small_model(rule, steps=0, dtype=dtype, dispatch=dispatch, **sizes).train().to(device)
    tokens = torch.randint(256, (16, 65), device=device)
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def step(model: GPT, tokens: Tensor, targets: Tensor, forward: Callable[..., object] | None = None) -> Tensor:
    """Forward, backward and the rules' update; gradients add to those that are there."""
    output = (model if forward is None else forward)(tokens, targets)
    output.loss.backward()  # type: ignore[attr-defined]
    model.update_rules(output.observations)  # type: ignore[attr-defined]
    loss: Tensor = output.loss.detach()  # type: ignore[attr-defined]
    return loss


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises RuntimeError."""
    try:
        with warnings.catch_warnings():  # torch warns once that the mode is a prototype
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def use_one_tile() -> None:
    """Let the tuner of the Triton kernels choose among one: compiling the others for toy sizes takes minutes."""
    from expert_threshold.kernels.gpu import experts as kernels

    for tuner in kernels.TUNED.values():
        tuner.configs = tuner.configs[:1]


def waits(dispatch: str) -> bool:
    """Return True if that backend waits for this GPU: PyTorch has the products of `static` on Hopper alone."""
    return dispatch == "static" and not on_hopper(torch.empty(0, device="cuda"))

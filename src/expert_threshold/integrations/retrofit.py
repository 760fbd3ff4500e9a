"""Converts a top-k checkpoint, either a run or a transformers model, to variable fanout.

The cutoffs are computed from the scores of a text. The checkpoint can then be distilled into its converted copy.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import IGNORED, Batch, Tokens, windows
from ..files import new_folder, read_json
from ..model import GPT, GPTConfig
from ..moe import MoE, Router
from ..routing import ExpertThreshold, Routing, Rule, TokenChoice, rule_name
from ..routing.cutoffs import LAST, LEVELS, CutoffState, dial
from ..runs import RunFolder
from ..runs.checkpoint import read, saved_steps, write
from ..runs.folder import derive
from .audit import load_any

Cutoffs = Literal["loads", "scores", "norms"]
"""How cutoffs are set. loads: each expert's cutoff is its k-th largest score. scores: all experts have the same cutoff
for score + bias. norms: all experts have the same cutoff for gate × mean norm of the expert's output."""
LOGITS_AT_ONCE, LONGEST = 2**25, 1024  # logits per batch; tokens per window of a transformers mixture
MEMORY, SAVE_EVERY = 0.95, 100  # while distilling: decay of the cutoffs' mean, steps between checkpoints


class Checkpoint:
    """A run that routes by top k, its model in evaluation mode. Raises ValueError for any other run."""

    def __init__(self, path: str, step: int | None, device: torch.device, dtype: torch.dtype) -> None:
        self.folder = RunFolder.open(path)
        with self.folder.named():
            config = GPTConfig.from_dict(self.folder.config)
        self.rule = _require_top_k(path, None if config.dense_layers == config.layers else config.rule)
        saved = self.folder.load_checkpoint(step, parts=("model",))
        self.step, self.context, self.vocab_size = saved.step, config.context, config.vocab_size
        self.model: Any = GPT(config, dtype).to(device).eval()
        self.model.load_state_dict(saved.tensors["model"])
        self.tokenizer: Any = self.folder.tokenizer()

    def with_rule(self, rule: Rule) -> Any:
        """Return a copy of the model that routes by `rule`, with a new state."""
        other = GPT(replace(self.model.config, rule=rule), self.model.compute_dtype).to(self.model.embed.weight.device)
        weights = {name: w for name, w in self.model.state_dict().items() if ".router.state_" not in name}
        other.load_state_dict(weights, strict=False)
        return other.eval()

    def save(self, model: Any, to: Path) -> None:
        """Write the model atomically to a new folder of the same kind."""
        derive(self.folder, to, self.step, model.state_dict(), model=model.config.to_dict())


class OfTransformers(Checkpoint):
    """A checkpoint of a transformers model that `swap_rule` supports."""

    def __init__(self, path: str, step: int | None, device: torch.device) -> None:
        loaded, tokenizer = load_any(path, step, device, "auto")
        from .swap import own_rule, swap_rule

        model: Any = loaded
        self.rule, self._swap = _require_top_k(path, own_rule(model)), swap_rule
        self.model, self.tokenizer, self.step = swap_rule(model, self.rule), Words(tokenizer), 0
        self.context, self.vocab_size = min(LONGEST, model.config.max_position_embeddings), model.config.vocab_size

    def with_rule(self, rule: Rule) -> Any:
        return self._swap(copy.deepcopy(self.model), rule)

    def save(self, model: Any, to: Path) -> None:
        with new_folder(to) as temporary:
            model.save_pretrained(temporary)
            self.tokenizer.own.save_pretrained(temporary)


class Words:
    """Adapts a transformers tokenizer to `pack`. Documents start with its bos token or, if it has none, eos."""

    def __init__(self, own: Any) -> None:
        self.own, self.vocab_size, self.hash = own, len(own), ""
        self.bos = own.eos_token_id if own.bos_token_id is None else own.bos_token_id
        if self.bos is None:
            raise ValueError("the tokenizer has neither bos_token nor eos_token to start documents with; set one")

    def encode_array(self, text: str) -> npt.NDArray[np.uint32]:
        return np.array(self.own(text, add_special_tokens=False, verbose=False)["input_ids"], np.uint32)


def open_checkpoint(path: str, step: int | None, device: torch.device, dtype: torch.dtype) -> Checkpoint:
    """Open a run or a transformers model. Raises ValueError unless it routes by top k."""
    file = Path(path) / "config.json"
    if file.is_file() and "model_type" in read_json(file):
        return OfTransformers(path, step, device)
    return Checkpoint(path, step, device, dtype)


def _require_top_k(path: str, rule: Rule | None) -> TokenChoice:
    if not isinstance(rule, TokenChoice):
        found = "has no experts" if rule is None else f"routes by {rule_name(rule)}, not by top k"
        raise ValueError(f"{path} {found}; use a Mixture-of-Experts model with token choice")
    return rule


def threshold_rule(rule: TokenChoice, experts_per_token: float) -> ExpertThreshold:
    """Return an expert-threshold rule with the gates of a top-k rule."""
    gates = {"gate": rule.gate, "gate_scale": rule.gate_scale, "null_scores": rule.null_scores}
    return ExpertThreshold(rule.num_experts, experts_per_token, warmup_steps=0, **gates)  # type: ignore[arg-type]


def routers(model: nn.Module) -> dict[str, Router]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


@contextmanager
def at_top(model: nn.Module, rule: TokenChoice, k: int) -> Iterator[None]:
    """Make a top-k model use another k inside a `with` block."""
    other = copy.copy(rule)
    object.__setattr__(other, "experts_per_token", k)  # the constructor rejects normalised gates of a single expert
    try:
        for router in routers(model).values():
            router.rule = other
        yield
    finally:
        for router in routers(model).values():
            router.rule = rule


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[tuple[Tensor, Routing]]]:
    """Yield a list to which each router's forward appends its input and its routing."""
    seen: list[tuple[Tensor, Routing]] = []
    with ExitStack() as hooks:
        for router in routers(model).values():
            hooks.enter_context(router.register_forward_hook(lambda _, given, found: seen.append((given[0], found))))
        yield seen


@torch.no_grad()
def document_sums(source: Checkpoint, model: Any, ids: npt.NDArray[Any]) -> tuple[float, float]:
    """Return a document's nats and routed experts, as in `evaluation.by_document.Sums`, measured in windows."""
    device, sums = next(model.parameters()).device, torch.zeros(2, dtype=torch.float64)
    rows = list(windows(Tokens(ids, np.array([0, len(ids)]), 0), source.context))
    at_once = max(LOGITS_AT_ONCE // (source.context * source.vocab_size), 1)
    for start in range(0, len(rows), at_once):
        tokens, targets = (torch.stack(part).to(device) for part in zip(*rows[start : start + at_once], strict=True))
        with recorded(model) as seen:
            logits = model(tokens).logits.float().flatten(0, 1)
        sums[0] += F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum").cpu()
        fanout = torch.stack([routing.assignment.sum(-1) for _, routing in seen]).float().mean(0)
        sums[1] += fanout[targets != IGNORED].sum().cpu()
    nats, experts = sums.tolist()
    return nats, experts


class Sample(NamedTuple):
    """The scores (tokens, experts) and the mean output norms (experts,) of each layer of a model on a text."""

    scores: list[Tensor]
    norms: list[Tensor]


@torch.no_grad()
def sample(model: nn.Module, batches: Iterable[Batch], progress: Callable[[int], None]) -> Sample:
    """Run batches through the model. Norms are averaged over the tokens that each expert receives at inference."""
    layers = [(model.get_submodule(name.rpartition(".")[0]), router) for name, router in routers(model).items()]
    experts, device = layers[0][1].rule.num_experts, layers[0][1].weight.device
    scores: list[list[Tensor]] = [[] for _ in layers]
    sums, counts = torch.zeros(2, len(layers), experts, device=device)
    for done, (tokens, _) in enumerate(batches, start=1):
        with recorded(model) as seen:
            model(tokens.to(device))
        for layer, (x, routing) in enumerate(seen):
            scores[layer].append(routing.scores.flatten(0, 1).cpu())
            assigned = routing.assignment[..., :experts].flatten(0, 1)
            for expert in assigned.any(0).nonzero()[:, 0].tolist():
                mine = x.flatten(0, -2)[assigned[:, expert]]
                sums[layer, expert] += _output(layers[layer][0], mine, expert).float().norm(dim=-1).sum()
                counts[layer, expert] += len(mine)
        progress(done)
    norms = torch.where(counts > 0, sums / counts, (sums.sum(1) / counts.sum(1))[:, None]).clamp(min=1e-30)
    return Sample([torch.cat(each) for each in scores], list(norms.cpu()))


def _output(mixture: Any, x: Tensor, expert: int) -> Tensor:
    """Return one expert's outputs for x (tokens, d_model) before multiplication by gates."""
    ids = torch.full((len(x), 1), expert, device=x.device)
    if not isinstance(mixture, MoE):
        into, out = (getattr(mixture, f"fc{n}_latent_proj", nn.Identity()) for n in (1, 2))  # of Nemotron-H
        y: Tensor = out(mixture.experts(into(x), ids, torch.ones_like(ids, dtype=x.dtype)))
        return y
    one = F.one_hot(ids[:, 0], mixture.router.rule.num_experts)
    return mixture.dispatch(x, one.to(x.dtype), one.bool(), mixture.experts, None, rows=None)


class Calibrator(NamedTuple):
    """Sets cutoffs. shift: each layer's offsets, which are added to its experts' values before they are compared."""

    cutoffs: Cutoffs
    num_experts: int
    sigmoid: bool
    shift: list[Tensor]

    @classmethod
    def of(cls, cutoffs: Cutoffs, source: Checkpoint, norms: list[Tensor]) -> Calibrator:
        if cutoffs == "norms":
            sigmoid = source.rule.gate.startswith("sigmoid")
            return cls(cutoffs, source.rule.num_experts, sigmoid, [norm.log() for norm in norms])
        shift = [router.state.bias.cpu() for router in routers(source.model).values()]
        sigmoid = source.rule.over == "gates" and source.rule.gate.startswith("sigmoid")
        if source.rule.over == "gates" and not sigmoid and any(bias.any() for bias in shift):
            raise ValueError("scores with biases on softmax gates are not comparable; use --cutoffs loads or norms")
        return cls(cutoffs, source.rule.num_experts, sigmoid, shift)

    def sketch(self, layer: int, scores: Tensor) -> Tensor:
        """Return cutoffs (levels, experts) for scores (tokens, num_scores), in the form of `routing.cutoffs.sketch`."""
        scores = scores[:, : self.num_experts]  # null scores follow
        if self.cutoffs == "loads":
            return _at_levels(scores)
        values = scores.sigmoid() if self.sigmoid else scores
        if logarithms := self.sigmoid and self.cutoffs == "norms":
            values = F.logsigmoid(scores)
        found = _at_levels((values + self.shift[layer]).flatten()[:, None]) - self.shift[layer]
        if self.sigmoid:
            found = (found.exp() if logarithms else found).clamp(1e-6, 1 - 1e-6).logit()
        return found.minimum(scores.amax(0) + 1)  # above all scores if no gate is large enough

    @torch.no_grad()
    def set(self, model: nn.Module, scores: Iterable[Tensor], memory: float = 0.0) -> None:
        """Update the cutoffs and sketches of all routers, as running means with decay `memory`. 0 replaces them."""
        for layer, (router, of_layer) in enumerate(zip(routers(model).values(), scores, strict=True)):
            old, one = router.state, torch.ones_like(router.state.weight)
            sketch = self.sketch(layer, of_layer.cpu()).to(old.sketch)
            sketch = torch.lerp(sketch, old.sketch, memory)
            state = CutoffState(old.mean, one, old.step, sketch, one, torch.zeros_like(old.slope))
            for value, new in zip(old, dial(state, router.rule.experts_per_token), strict=True):
                value.copy_(new)


def _at_levels(values: Tensor) -> Tensor:
    """Return the quantiles of each column: at each level, a fixed fraction of the rows is above the quantile."""
    place = torch.linspace(LAST, -LAST, LEVELS).sigmoid() * (len(values) + 1) - 1
    return values.sort(0).values[place.clamp(0, len(values) - 1).round().long()]


def distill(
    teacher: Any, student: Any, batches: Iterator[Batch], steps: int, lr: float, folder: Path, *, routers_only: bool,
    calibrator: Calibrator, progress: Callable[[int, int], None], stop: Callable[[], bool],
) -> None:  # fmt: skip
    """Train the student, which always routes as at inference, to match the teacher's predictions (KL divergence).

    AdamW's learning rate falls linearly from `lr` to 0, and the cutoffs follow the scores. Training continues from the
    last checkpoint in `folder`, where it also saves. Once `stop` returns True, saves and raises KeyboardInterrupt.
    """
    student.requires_grad_(not routers_only)
    for router in routers(student).values():
        router.weight.requires_grad_(True)
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    # bfloat16 would round small updates away, so AdamW has float32 weights, the model's own if it is float32
    masters = [nn.Parameter(parameter.detach().float()) for parameter in trained]
    optimizer = torch.optim.AdamW(masters, lr, betas=(0.9, 0.95), weight_decay=0.0)
    changed: dict[str, Tensor] = {str(i): master for i, master in enumerate(masters)}
    changed |= {name: value for name, value in student.named_buffers() if ".state_" in name}
    if begun := max(saved_steps(folder), default=0):
        saved = read(folder, begun).tensors
        states: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
        for name, value in saved["optimizer"].items():
            index, _, key = name.partition(".")
            states[int(index)][key] = value
        optimizer.load_state_dict(optimizer.state_dict() | {"state": states})
        with torch.no_grad():
            for name, value in changed.items():
                value.copy_(saved["model"][name])
            for master, parameter in zip(masters, trained, strict=True):
                parameter.copy_(master)
    for step, (tokens, _) in enumerate(islice(batches, begun, steps), start=begun):
        tokens = tokens.to(trained[0].device)
        with torch.no_grad():
            wanted = teacher(tokens).logits.float().log_softmax(-1).flatten(0, 1)
        with recorded(student) as seen:
            found = student(tokens).logits.float().log_softmax(-1).flatten(0, 1)
        F.kl_div(found, wanted, log_target=True, reduction="batchmean").backward()
        for master, parameter in zip(masters, trained, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(masters, trained, strict=True):
                parameter.copy_(master)
        calibrator.set(student, [routing.scores.flatten(0, 1).detach() for _, routing in seen], MEMORY)
        progress(step + 1, steps)
        stopped = stop()
        if stopped or (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            folder.mkdir(parents=True, exist_ok=True)
            adam = {f"{i}.{key}": v for i, of in optimizer.state_dict()["state"].items() for key, v in of.items()}
            write(folder, step + 1, {"model": changed, "optimizer": adam}, {}, keep=1)
        if stopped:
            raise KeyboardInterrupt

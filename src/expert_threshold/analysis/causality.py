"""Tests a language model's causality as a black box: changes inputs that must not matter and compares logits.

If memory allows, the model runs in float64, so that kernels for different batch sizes differ by far less than any leak
and no choice of experts depends on rounding.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..model import GPT
from ..routing import Routing

FACTOR = 4
"""The tolerance, in multiples of the largest change that the simulated rounding errors caused."""
LOGITS = ""
"""The key of the logits in `Results`; all other keys are names of routers."""

Results = dict[str, Tensor]
"""Logits (rows, time, vocab), and the assignment (rows, time, experts) of each router by its name."""


def routing_of(module: Any, output: Any) -> tuple[Tensor, Tensor] | None:
    """Return scores and assignment, both (tokens, experts), or None if this is not a router's output.

    Routers of this package return a `Routing`. Routers of transformers return a tuple of scores (tokens, experts),
    weights and expert ids (tokens, K), or, in the Switch Transformer, a tuple of scores and a mask of experts.
    """
    if isinstance(output, Routing):
        experts = module.rule.num_experts  # null slots and null scores follow the experts
        return output.scores[..., :experts].flatten(0, 1), output.assignment[..., :experts].flatten(0, 1)
    parts = [part for part in output if isinstance(part, Tensor)] if isinstance(output, tuple) else []
    parts = [part.reshape(-1, part.shape[-1]) for part in parts if part.ndim > 1]
    ids, numbers = ([part for part in parts if part.is_floating_point() == floats] for floats in (False, True))
    if len(ids) != 1 or not numbers:
        return None
    (chosen,), scores = ids, max(numbers, key=lambda part: part.shape[1])
    if len(chosen) != len(scores):
        return None
    weights = next((part for part in numbers if part is not scores and part.shape == chosen.shape), None)
    if weights is None:
        return (scores, chosen.bool()) if chosen.shape == scores.shape else None
    counted = (weights != 0).to(scores.dtype)  # for a token with fewer experts, the remaining weights are 0
    return scores, torch.zeros_like(scores).scatter_add(1, chosen.long(), counted) > 0


@contextmanager
def watched(model: nn.Module) -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    """Record each router's scores and assignments in every forward pass, keyed by router name in layer order."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def note(name: str, module: nn.Module, _inputs: Any, output: Any) -> None:
        if (routing := routing_of(module, output)) is not None:
            found.setdefault(name, []).append(routing)

    handles = [module.register_forward_hook(partial(note, name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def forward(model: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the logits for tokens (rows, time). mask: False for padding, which position ids skip."""
    accepted = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {}
    if mask is not None:
        options = {"attention_mask": mask.long(), "position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)}
        if "attention_mask" not in accepted:
            raise ValueError(f"{type(model).__name__} does not accept an attention mask")
    options["use_cache"] = False
    output = model(tokens, **{name: value for name, value in options.items() if name in accepted})
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:2] != tokens.shape:
        raise ValueError(f"{type(model).__name__} does not return logits for each token; pass a causal language model")
    return logits


def forward_in_chunks(model: Any, tokens: Tensor, cuts: Sequence[int]) -> Tensor:
    """Return the logits of tokens (rows, time), computed in several forward passes with a cache."""
    chunks = tokens.tensor_split(list(cuts), 1)
    if isinstance(model, GPT):
        cache = model.new_cache(*tokens.shape)
        for row in range(len(tokens)):
            cache.begin(row, {layer: moe.router.past(moe.router.rate) for layer, moe in model.moe_layers()})
        return torch.cat([model(chunk, cache=cache).logits for chunk in chunks], 1)
    kept: dict[str, Any] = {}
    logits = []
    for chunk in chunks:
        output = model(chunk, use_cache=True, **kept)
        logits.append(output.logits)
        kept = {name: output[name] for name in ("past_key_values", "cache_params") if output.get(name) is not None}
        if not kept:
            raise ValueError(f"{type(model).__name__} returns no cache")
    return torch.cat(logits, 1)


class _Exact(TorchDispatchMode):
    """Computes in float64 even what the model casts to a lower precision, such as norms, softmax and scores."""

    def __enter__(self) -> _Exact:
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if isinstance(dtype := options.get("dtype"), torch.dtype) and dtype.is_floating_point:
            options["dtype"] = torch.float64
        return func(*args, **options)


class Check(NamedTuple):
    """The effect of one kind of change on positions that it must not affect."""

    what: str
    positions: int = 0
    changed: int = 0  # of these positions
    largest: float = 0.0  # change of a logit
    routers: dict[str, int] = {}  # noqa: RUF012  # positions whose experts changed, keyed by router
    reason: str = ""  # why the check did not run


class Probe:
    """A model and the tokens (rows, time) on which it is tested. `base` is its result for the unchanged tokens.

    The model runs in float64 if its weights fit into half of the memory, and in its own dtype otherwise. Raises
    ValueError if logits are NaN or random.
    """

    def __init__(self, model: nn.Module, tokens: Tensor) -> None:
        self.model: Any = model
        self.tokens, self.seed, self.exact = tokens, 0, False
        self.unchanged = partial(forward, tokens=tokens)
        known = max(int(tokens.max()) + 1, 2)
        drawn = torch.randint(1, known, tokens.shape, generator=torch.Generator().manual_seed(0))
        self.other = (tokens + drawn.to(tokens)) % known
        if 8 * sum(parameter.numel() for parameter in model.parameters()) <= _memory(tokens.device) / 2:
            self._raise_precision(model)
        self.base = self.see(self.unchanged)
        own = model.compute_dtype if isinstance(model, GPT) else next(model.parameters()).dtype
        self.dtype = torch.float64 if self.exact else own
        if self.base[LOGITS].isnan().any():
            raise ValueError("the model's logits are not finite; audit another checkpoint")
        self.tolerance = self._measure_tolerance()

    def _raise_precision(self, model: nn.Module) -> None:
        try:
            self.model, self.exact = copy.deepcopy(model).double(), True
            if isinstance(self.model, GPT):
                self.model.compute_dtype = torch.float64
            if hasattr(self.model, "set_experts_implementation"):
                self.model.set_experts_implementation("eager")  # torch's grouped products have no float64
            self.see(self.unchanged)
        except Exception:  # other operations without float64 raise any type of error
            self.model, self.exact = model, False

    def see(self, compute: Callable[[Any], Tensor]) -> Results:
        """Return the logits that `compute` returns and the assignments that routers make meanwhile."""
        # inference_mode would hide the casts inside composite operations
        with torch.random.fork_rng(), torch.no_grad(), watched(self.model) as found:
            torch.manual_seed(self.seed)
            with _Exact() if self.exact else nullcontext():
                logits = compute(self.model)
        rows = len(logits)
        choices = {n: torch.cat([z.view(rows, -1, z.shape[1]) for _, z in parts], 1) for n, parts in found.items()}
        return {LOGITS: logits} | {n: choice for n, choice in choices.items() if choice.shape[1] == logits.shape[1]}

    def _measure_tolerance(self) -> float:
        """Return a bound on the effect of rounding: FACTOR times the largest change of a logit if each module's output
        is off by one unit in the last place. The unit is float32's even in float64, since constants may be stored in
        float32. Leaks do not raise the bound, since tokens, batch and shapes stay the same.
        """
        step = torch.finfo(torch.float32 if self.exact else self.dtype).eps
        generator = torch.Generator().manual_seed(0)

        def shake(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return output
            return output * (1 + step * (2 * torch.rand(output.shape, generator=generator).to(output) - 1))

        leaves = [module for module in self.model.modules() if not list(module.children())]
        handles = [module.register_forward_hook(shake) for module in leaves]
        tolerance = FACTOR * max(float(self._apart(self.see(self.unchanged)).max()) for _ in range(2))
        for handle in handles:
            handle.remove()
        self.seed = 1
        again = float(self._apart(self.see(self.unchanged)).max())
        if again > tolerance:
            raise ValueError(f"logits of the same tokens differ by {again:.2g} between calls; disable its randomness")
        return tolerance

    def _apart(self, seen: Results) -> Tensor:
        """Return the largest change of a logit at each position (rows, time); infinite if a logit is NaN."""
        new, old = seen[LOGITS], self.base[LOGITS]
        return torch.where(new == old, 0, (new - old).abs()).amax(-1).nan_to_num(nan=torch.inf)

    def _trials(self) -> Iterator[tuple[str, Callable[[Any], Tensor], Callable[[Tensor], Tensor], Tensor]]:
        """Yield each change's name, forward, function that aligns results with `base`, and positions to compare."""
        tokens, other, rows, time = self.tokens, self.other, *self.tokens.shape
        place = torch.arange(time, device=tokens.device).expand(rows, time)
        row = torch.arange(rows, device=tokens.device)[:, None].expand(rows, time)

        def given(tokens: Tensor, mask: Tensor | None = None) -> Callable[[Any], Tensor]:
            return partial(forward, tokens=tokens, mask=mask)

        for mine in (row == 0, row == rows - 1):  # change one row, since other rows would be changed neighbours
            for cut in (time // 4, time // 2, time - 1):
                earlier = mine & (place < cut)
                yield "later tokens", given(tokens.where(earlier | ~mine, other)), Tensor.clone, earlier
            yield "neighbours", given(tokens.where(mine, other)), Tensor.clone, mine
            yield "neighbours", given(tokens[mine][None]), lambda x: x.expand(rows, -1, -1), mine
        yield "neighbours", given(tokens.flip(0)), lambda x: x.flip(0), row >= 0
        padding = (row + 1) * time // (2 * rows)
        kept = place < time - padding
        yield "padding", given(tokens.where(kept, other), kept), Tensor.clone, kept
        moved, back = tokens.gather(1, (place - padding).clamp(min=0)), (place + padding).clamp(max=time - 1)
        left = place >= padding
        yield "padding", given(moved.where(left, other), left), lambda x: x[row, back], kept
        for cuts in ([time // 2], [time // 3, time - 2, time - 1]):
            yield "chunks", partial(forward_in_chunks, tokens=tokens, cuts=cuts), Tensor.clone, row >= 0

    def checks(self, progress: Callable[[int, int], None]) -> list[Check]:
        """Return a check for each kind of change."""
        found: dict[str, Check] = {}
        trials = list(self._trials())
        for done, (what, compute, put, kept) in enumerate(trials, start=1):
            check = found.setdefault(what, Check(what))
            try:
                seen = {name: put(result) for name, result in self.see(compute).items()}
            except Exception as error:  # the model may reject it with any type of error
                found[what] = check._replace(reason=" ".join(f"{type(error).__name__}: {error}".split())[:200])
                continue
            apart = self._apart(seen).where(kept, 0)
            others = {n: (z != seen[n]).any(-1) & kept for n, z in self.base.items() if n != LOGITS and n in seen}
            changed = apart > self.tolerance
            for choice in others.values() if self.exact else ():
                changed |= choice
            found[what] = check._replace(
                positions=check.positions + int(kept.sum()),
                changed=check.changed + int(changed.sum()),
                largest=max(check.largest, float(apart.max())),
                routers={name: check.routers.get(name, 0) + int(choice.sum()) for name, choice in others.items()},
            )
            progress(done, len(trials))
        return list(found.values())


def _memory(device: torch.device) -> float:
    """Return the free memory of a GPU or all memory of the CPU in bytes, or 0 if the device has no float64."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) if device.type == "cpu" else 0.0

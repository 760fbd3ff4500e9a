"""Causality of any language model, judged as a black box: what may not matter is changed, and logits are compared.

The model is computed in float64, in which kernels of other batch sizes differ by far less than any leak and no score
ties with another one by rounding. The tolerance is measured, see `Probe.measure_tolerance`.
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

STEP = 2.0**-40
"""The relative error that is tried in float64: thousands of times float64's own, far below what flips a choice."""
FACTOR = 4
"""The tolerance, in multiples of the largest change under the errors that were tried."""
LOWER = (torch.float32, torch.bfloat16, torch.float16)


class Choice(NamedTuple):
    """What a router decided. scores: (tokens, experts); assignment: bool, of the same shape."""

    scores: Tensor
    assignment: Tensor


def choice_of(module: Any, output: Any) -> Choice | None:
    """Return what a module's output says if it is a router's, else None.

    Routers return a `Routing`, or as in transformers a tuple of scores (tokens, experts), weights and ids (tokens, K),
    or, like Switch, scores and a mask of experts.
    """
    if isinstance(output, Routing):
        experts = module.rule.num_experts  # null slots and null scores come after them
        return Choice(*(part[..., :experts].flatten(0, 1) for part in (output.scores, output.assignment)))
    if not isinstance(output, tuple):
        return None
    parts = [part.reshape(-1, part.shape[-1]) for part in output if isinstance(part, Tensor) and part.ndim > 1]
    numbers, ids = ([part for part in parts if part.is_floating_point() == floats] for floats in (True, False))
    if len(ids) != 1 or not numbers:
        return None
    (chosen,), scores = ids, max(numbers, key=lambda part: part.shape[1])
    experts = scores.shape[1]
    if len(chosen) != len(scores) or chosen.shape[1] > experts:
        return None
    weights = next((part for part in numbers if part is not scores and part.shape == chosen.shape), None)
    if weights is None:
        return Choice(scores, chosen.bool()) if chosen.shape == scores.shape else None
    counted = ((weights != 0) & (chosen >= 0) & (chosen < experts)).to(scores.dtype)
    return Choice(scores, torch.zeros_like(scores).scatter_add(1, chosen.long().clamp(0, experts - 1), counted) > 0)


@contextmanager
def watched(model: nn.Module) -> Iterator[dict[str, list[Choice]]]:
    """Record what each router decides in every forward within the context, by the router's name, first layer first."""
    found: dict[str, list[Choice]] = {}

    def note(name: str, module: nn.Module, _inputs: Any, output: Any) -> None:
        if (choice := choice_of(module, output)) is not None:
            found.setdefault(name, []).append(choice)

    handles = [module.register_forward_hook(partial(note, name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    for name in [name for name in found if any(other.startswith(f"{name}.") for other in found)]:
        del found[name]  # a wrapper returns what the router in it returned


class Seen(NamedTuple):
    """The results of a forward: logits (rows, time, vocab), and by router its assignment (rows, time, experts)."""

    logits: Tensor
    choices: dict[str, Tensor]

    def map(self, place: Callable[[Tensor], Tensor]) -> Seen:
        return Seen(place(self.logits), {name: place(choice) for name, choice in self.choices.items()})


class Check(NamedTuple):
    """What became of the positions that a change may not reach. largest: of logits, None if they are not numbers.

    choices: by router, at how many of these positions it chose other experts. reason: why nothing could be judged.
    """

    what: str
    positions: int = 0
    changed: int = 0
    largest: float = 0.0
    choices: dict[str, int] = {}  # noqa: RUF012
    reason: str = ""


class _Exact(TorchDispatchMode):
    """Computes in float64 what a model computes in float32 by its own choice, such as norms, softmax and scores."""

    def __enter__(self) -> _Exact:
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = {} if kwargs is None else kwargs
        if isinstance(dtype := options.get("dtype"), torch.dtype) and dtype in LOWER:
            options = options | {"dtype": torch.float64}
        return func(*args, **options)


def forward(model: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the logits of tokens (rows, time). mask: False for padding, which positions do not count."""
    options: dict[str, Any] = {}
    accepted = inspect.signature(model.forward).parameters
    if mask is not None:
        if "attention_mask" not in accepted:
            raise ValueError(f"{type(model).__name__} accepts no attention_mask")
        options["attention_mask"] = mask.long()
        if "position_ids" in accepted:
            options["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)
    if "use_cache" in accepted:
        options["use_cache"] = False
    output = model(tokens, **options)
    logits: Any = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:2] != tokens.shape:
        raise ValueError(f"{type(model).__name__} returns no logits by token; give a causal language model")
    return logits


def forward_in_chunks(model: Any, tokens: Tensor, cuts: Sequence[int]) -> Tensor:
    """Return the logits of tokens (rows, time) that are read in several forwards with a cache."""
    rows, time = tokens.shape
    cache: dict[str, Any] = {}
    if isinstance(model, GPT):
        cache["cache"] = model.new_cache(rows, time)
        for row in range(rows):
            cache["cache"].begin(row, {layer: moe.router.past(moe.router.rate) for layer, moe in model.moe_layers()})
    elif "use_cache" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{type(model).__name__} has no cache")
    logits = []
    for chunk in tokens.tensor_split(list(cuts), 1):
        output = model(chunk, **cache, **({} if isinstance(model, GPT) else {"use_cache": True}))
        logits.append(output.logits)
        if not isinstance(model, GPT):
            kept = {name: getattr(output, name, None) for name in ("past_key_values", "cache_params")}
            cache = {name: value for name, value in kept.items() if value is not None}
            if not cache:
                raise ValueError(f"{type(model).__name__} returns no cache")
    return torch.cat(logits, 1)


class Probe:
    """A model with the tokens (rows, time) that it is tried on; `base` is what it makes of them unchanged.

    Computes in float64 if the weights fit into half of the memory; else in the model's own dtype, where rounding can
    change the choice of experts, and the tolerance is accordingly wide.
    """

    def __init__(self, model: nn.Module, tokens: Tensor) -> None:
        self.tokens, self.seed = tokens, 0
        generator = torch.Generator().manual_seed(0)
        known = max(int(tokens.max()) + 1, 2)
        self.other = (tokens + torch.randint(1, known, tokens.shape, generator=generator).to(tokens)) % known
        self.model: Any = model
        self.exact = False
        if 8 * sum(parameter.numel() for parameter in model.parameters()) <= _memory(tokens.device) / 2:
            self.model, self.exact = copy.deepcopy(model).double(), True
            if isinstance(self.model, GPT):
                self.model.compute_dtype = torch.float64
            try:
                if hasattr(self.model, "set_experts_implementation"):
                    self.model.set_experts_implementation("eager")  # torch's grouped products have no float64
                self.base = self.forward(tokens)
            except Exception:  # of operations that are only there in lower precision
                self.model, self.exact = model, False
        if not self.exact:
            self.base = self.forward(tokens)
        if self.base.logits.isnan().any():
            raise ValueError("the model's logits are not numbers; audit another checkpoint")
        self.dtype = self.base.logits.dtype if self.exact else next(model.parameters()).dtype
        self.tolerance = self.measure_tolerance()

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Seen:
        return self._seen(lambda: forward(self.model, tokens, mask))

    def in_chunks(self, cuts: Sequence[int]) -> Seen:
        return self._seen(lambda: forward_in_chunks(self.model, self.tokens, cuts))

    def _seen(self, compute: Callable[[], Tensor]) -> Seen:
        # inference_mode would hide the casts inside composite operations
        with torch.random.fork_rng(), torch.no_grad(), watched(self.model) as found:
            torch.manual_seed(self.seed)
            with _Exact() if self.exact else nullcontext():
                logits = compute()
        rows, time = logits.shape[:2]
        choices = {}
        for name, parts in found.items():
            if sum(len(part.assignment) for part in parts) == rows * time:
                choices[name] = torch.cat([p.assignment.view(rows, -1, p.assignment.shape[1]) for p in parts], 1)
        return Seen(logits, choices)

    def measure_tolerance(self) -> float:
        """Return a bound on what rounding changes: 4 × the largest change of logits when the output of each module is
        multiplied by 1 ± an error, one unit in the last place, or 2^-40 in float64.

        Nothing that leaks enters, since tokens, batch and shapes stay. Raises ValueError if the same tokens give other
        logits without any error.
        """
        step = STEP if self.exact else torch.finfo(self.dtype).eps
        generator = torch.Generator().manual_seed(0)

        def shake(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return None
            return output * (1 + step * (2 * torch.rand(output.shape, generator=generator).to(output) - 1))

        leaves = [module for module in self.model.modules() if not any(True for _ in module.children())]
        handles = [module.register_forward_hook(shake) for module in leaves]
        shaken = [self.forward(self.tokens) for _ in range(2)]
        for handle in handles:
            handle.remove()
        tolerance = FACTOR * max(float(self._apart(seen).max()) for seen in shaken)
        self.seed = 1
        again = float(self._apart(self.forward(self.tokens)).max())
        if again > tolerance:
            raise ValueError(f"the same tokens twice give logits {again:.2g} apart; switch off what draws at random")
        return tolerance

    def _apart(self, seen: Seen) -> Tensor:
        """Return the largest change of a logit at each position (rows, time); infinite if one is no number."""
        apart = torch.where(seen.logits == self.base.logits, 0, (seen.logits - self.base.logits).abs())
        return apart.amax(-1).nan_to_num(nan=torch.inf)

    def _trials(self) -> Iterator[tuple[str, Callable[[], Seen], Tensor]]:
        """Yield what is changed, the results at the places of `base`, and where they may not differ (rows, time)."""
        tokens, other, forward = self.tokens, self.other, self.forward
        rows, time = tokens.shape
        place = torch.arange(time, device=tokens.device).expand(rows, time)
        row = torch.arange(rows, device=tokens.device)[:, None].expand(rows, time)
        for mine in (0, rows - 1):
            for cut in (
                time // 4,
                time // 2,
                time - 1,
            ):  # of this row alone, for the others have neighbours that change
                before = (row != mine) | (place < cut)
                yield "later tokens", partial(forward, tokens.where(before, other)), before & (row == mine)
            yield "neighbours", partial(forward, tokens.where(row == mine, other)), row == mine
            alone = partial(forward, tokens[mine : mine + 1])
            yield "neighbours", lambda alone=alone: alone().map(lambda x: x.expand(rows, -1, -1)), row == mine  # type: ignore[misc]
        yield "neighbours", lambda: forward(tokens.flip(0)).map(lambda x: x.flip(0)), row >= 0
        padding = (row + 1) * time // (2 * rows)
        yield "padding", partial(forward, tokens.where(kept := place < time - padding, other), kept), kept
        moved = tokens.gather(1, (place - padding).clamp(min=0)).where(place >= padding, other)
        back = (place + padding).clamp(max=time - 1)
        yield "padding", lambda: forward(moved, place >= padding).map(lambda x: x[row, back]), kept
        for cuts in ([time // 2], [time // 3, time - 2, time - 1]):
            yield "chunks", partial(self.in_chunks, cuts), row >= 0

    def checks(self, progress: Callable[[int, int], None]) -> list[Check]:
        """Return a check for each kind of change."""
        found: dict[str, Check] = {}
        trials = list(self._trials())
        for done, (what, compute, kept) in enumerate(trials, start=1):
            before = found.setdefault(what, Check(what))
            try:
                seen = compute()
            except Exception as error:  # the model refuses it, by any type of error
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                found[what] = before._replace(reason=before.reason or reason)
                continue
            apart = self._apart(seen).where(kept, 0)
            changed, choices = apart > self.tolerance, dict(before.choices)
            for name in seen.choices.keys() & self.base.choices.keys():
                others = (seen.choices[name] != self.base.choices[name]).any(-1) & kept
                choices[name] = choices.get(name, 0) + int(others.sum())
                changed = changed | (others if self.exact else False)
            found[what] = before._replace(
                positions=before.positions + int(kept.sum()),
                changed=before.changed + int(changed.sum()),
                largest=max(before.largest, float(apart.max())),
                choices={name: choices[name] for name in self.base.choices if name in choices},
            )
            progress(done, len(trials))
        return list(found.values())


def _memory(device: torch.device) -> float:
    """Return the bytes of memory that a copy of the weights may be put into."""
    if device.type == "cpu":
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0.0

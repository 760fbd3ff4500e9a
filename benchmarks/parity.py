"""Compares routing rules with their published code on the same random scores, and nanochat's trunk with nanochat.

    python benchmarks/parity.py --out docs/results/parity --megatron ../Megatron-LM --torchtitan ../torchtitan \
        --remoe ../ReMoE --dynamic-moe ../Dynamic_MoE --moe-plus-plus ../MoE-plus-plus \
        --release ../Expert-Threshold-Routing --nanochat ../nanochat

Each path is a checkout or, but for nanochat, a bare repository; files are read at its HEAD. What has no path is left
out. Only the functions that route are taken from a file, since most packages cannot be imported without a GPU.
--seq-top-k names a file with the functions of Megatron-LM's pull request #6208, which is not merged. The tests compare
with transformers' routers.

An assignment must be equal in every pair, numbers (gates, losses, the next step's biases, prices or cutoffs) to
within a relative 1e-5. Ends with exit code 1 if one is not. Not part of CI.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from speedrun import nanochat_model, prepare_nanochat
from torch import Tensor, nn

from expert_threshold.analysis.results import markdown
from expert_threshold.model import GPT, TRUNKS, GPTConfig
from expert_threshold.routing import (
    BiasState,
    ExpertChoice,
    ExpertThreshold,
    NullSlots,
    QuantileBalancing,
    ReLU,
    Routing,
    SeqTopK,
    TokenChoice,
    TopP,
    cutoff,
)
from expert_threshold.routing.quantile_balancing import price

EXPERTS, BATCH, TIME, STEPS = 16, 4, 96, 5
TOKENS = BATCH * TIME


class Found(NamedTuple):
    """One implementation's result on one batch: the assignment (tokens, experts), and numbers to compare by name."""

    assignment: Tensor
    numbers: dict[str, Tensor]


@dataclass(frozen=True)
class Code:
    """A file of published code in a repository.

    option: the option with the path of a checkout, or of the file itself. path, version: where it is at hand.
    """

    name: str
    option: str
    file: str
    path: Path | None = None
    version: str = ""

    def at(self, path: Path | None) -> Code:
        """Return the code at a path. Raises ValueError with the reason if it is not at hand."""
        flag = f"--{self.option.replace('_', '-')}"
        if path is None or not path.exists():
            raise ValueError(f"no {flag}" if path is None else f"{flag} {path} does not exist")
        version = "text of the pull request" if path.is_file() else git(path, "rev-parse", "HEAD").strip()[:10]
        return replace(self, path=path, version=version)

    def lift(self, *names: str, **surroundings: Any) -> SimpleNamespace:
        """Return the functions and classes of these names, run by themselves among `surroundings`."""
        assert self.path is not None
        whole = self.path.read_text() if self.path.is_file() else git(self.path, "show", f"HEAD:{self.file}")
        every = [node for node in ast.parse(whole).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        parts: list[ast.stmt] = [node for node in every if node.name in names]
        if missing := set(names) - {node.name for node in every}:
            raise ValueError(f"{self.file} at {self.version} has no {sorted(missing)[0]}")
        known = {
            name: getattr(typing, name) for name in ("Any", "Callable", "Dict", "List", "Literal", "Optional", "Tuple")
        }
        known |= {"torch": torch, "F": F, "nn": nn, "Tensor": Tensor, "Module": nn.Module}
        known |= {"dataclass": dataclass, "defaultdict": defaultdict} | surroundings
        exec(compile(ast.Module(parts, []), self.file, "exec"), known)
        return SimpleNamespace(**{name: known[name] for name in names})


def git(path: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(path), *arguments], check=True, capture_output=True, text=True).stdout


Compare = Callable[[Code, Callable[[int], Tensor]], Iterator[tuple[Found, Found]]]


class Comparison(NamedTuple):
    """A rule and the code that it is compared with, on several batches."""

    rule: str
    code: Code
    compare: Compare
    remark: str = ""


COMPARISONS: list[Comparison] = []


def against(rule: str, code: Code, remark: str = "") -> Callable[[Compare], Compare]:
    def enter(compare: Compare) -> Compare:
        COMPARISONS.append(Comparison(rule, code, compare, remark))
        return compare

    return enter


def ours(routing: Routing, **numbers: Tensor) -> Found:
    """Return our result; gates are zero where the assignment is False."""
    gates = routing.gates.detach() * routing.assignment
    return Found(routing.assignment.flatten(0, 1), {"gates": gates.flatten(0, 1), **numbers})


def dense(chosen: Tensor, gates: Tensor, width: int = EXPERTS) -> tuple[Tensor, Tensor]:
    """Return assignment and gates (tokens, width) of the chosen experts and their gates (tokens, k)."""
    zeros = torch.zeros(len(chosen), width)
    return zeros.scatter(1, chosen, 1.0).bool(), zeros.scatter(1, chosen, gates.detach())


@against(
    "null_slots",
    Code("SkyworkAI/MoE-plus-plus", "moe_plus_plus", "MoE++/moe_plus_plus_layer.py"),
    "gates differ by definition: over the chosen slots there, over all here; it has constant slots too",
)
def moe_plus_plus(code: Code, scores: Callable[[int], Tensor]) -> Iterator[tuple[Found, Found]]:
    gating = code.lift("gating", MOE_TOP_K=2).gating
    rule = NullSlots(EXPERTS - 4, 1, null_slots=4, slots_per_token=2, bias_rate=0.0)
    for step in range(STEPS):
        routing = rule.route(scores(step), rule.init(), training=True)
        assignment = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
        for expert, (tokens, _) in gating(scores(step).flatten(0, 1), moe_use_mixtral_gating=True).items():
            assignment[tokens, expert] = True
        yield Found(routing.assignment.flatten(0, 1), {}), Found(assignment[:, : rule.num_experts], {})


MEGATRON = Code("NVIDIA/Megatron-LM", "megatron", "megatron/core/transformer/moe/moe_utils.py")


def megatron_routing(code: Code) -> Any:
    return code.lift(
        "topk_routing_with_score_function", "group_limited_topk", "qb_dual_update", "get_updated_expert_bias",
        is_batch_invariant_mode_enabled=lambda: False, HAVE_TE=False,
    )  # fmt: skip


@against("quantile_balancing", MEGATRON, "prices before their mean is subtracted, as in both")
def quantile_balancing(code: Code, scores: Callable[[int], Tensor]) -> Iterator[tuple[Found, Found]]:
    megatron = megatron_routing(code)
    for rule in (
        QuantileBalancing(EXPERTS, 2, gate="sigmoid_normalised"),
        QuantileBalancing(EXPERTS, 2, gate="softmax_chosen", decay=0.5),
        QuantileBalancing(EXPERTS, 1, over="gates"),
    ):
        state, score_function = rule.init(), "softmax" if rule.gate.startswith("softmax") else "sigmoid"
        for step in range(STEPS):
            logits = scores(step).flatten(0, 1)
            values = logits if rule.over == "scores" else logits.sigmoid()
            indices, beta = megatron.qb_dual_update(values, rule.experts_per_token, price(state))
            gates, assignment = megatron.topk_routing_with_score_function(
                logits, rule.experts_per_token, score_function=score_function, precomputed_indices=indices
            )
            routing = rule.route(scores(step), state, training=True)
            yield (
                ours(routing, price=routing.observation.price_sum),
                Found(assignment, {"gates": gates, "price": beta}),
            )
            state = rule.update(state, routing.observation)


@against("token_choice, loss_free over gates, in groups", MEGATRON, "the next step's biases too")
def loss_free(code: Code, scores: Callable[[int], Tensor]) -> Iterator[tuple[Found, Found]]:
    megatron = megatron_routing(code)
    rule = TokenChoice(
        EXPERTS, 4, balance="loss_free", bias_rate=0.001, over="gates", gate="sigmoid_normalised", gate_scale=2.5,
        num_groups=4, groups_per_token=2,
    )  # fmt: skip
    state = rule.init()
    for step in range(STEPS):
        gates, assignment = megatron.topk_routing_with_score_function(
            scores(step).flatten(0, 1), 4, score_function="sigmoid", expert_bias=state.bias, scaling_factor=2.5,
            num_groups=4, group_topk=2,
        )  # fmt: skip
        counts = assignment.sum(0).float()
        bias = megatron.get_updated_expert_bias(counts, state.bias, rule.bias_rate, dist.group.WORLD)
        routing = rule.route(scores(step), state, training=True)
        state = rule.update(state, routing.observation)
        yield ours(routing, bias=state.bias), Found(assignment, {"gates": gates, "bias": bias})


@against(
    "token_choice as DeepSeek-V3",
    Code("pytorch/torchtitan", "torchtitan", "torchtitan/models/common/moe.py"),
    "its biases move by sign less the mean of signs, which changes no selection",
)
def torchtitan(code: Code, scores: Callable[[int], Tensor]) -> Iterator[tuple[Found, Found]]:
    base = type("Module", (nn.Module,), {"Config": type("Config", (), {})})
    there = code.lift("TokenChoiceTopKRouter", Module=base, Linear=SimpleNamespace(Config=Any))
    groups = {"num_expert_groups": 8, "num_limited_groups": 4}
    config = {"num_experts": EXPERTS, "top_k": 4, "route_norm": True, "route_scale": 2.5, **groups}
    identity = SimpleNamespace(build=nn.Identity)
    rule = TokenChoice(
        EXPERTS, 4, gate="sigmoid_normalised", gate_scale=2.5, over="gates", num_groups=8, groups_per_token=4
    )
    router = there.TokenChoiceTopKRouter(
        SimpleNamespace(gate=identity, score_func="sigmoid", _debug_force_load_balance=False, **config)
    )
    for step in range(STEPS):
        bias = 0.1 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(1000 + step))
        weights, chosen, _ = router(scores(step).flatten(0, 1), bias)
        assignment, gates = dense(chosen, weights)
        yield ours(rule.route(scores(step), BiasState(bias), training=True)), Found(assignment, {"gates": gates})


@against("relu", Code("thu-ml/ReMoE", "remoe", "megatron/core/transformer/moe/router.py"))
def remoe(code: Code, scores: Callable[[int], Tensor]) -> Iterator[tuple[Found, Found]]:
    router = code.lift("ReLURouter", Router=object, TransformerConfig=Any).ReLURouter
    losses = replace(code, file="megatron/core/transformer/moe/moe_utils.py")
    loss = losses.lift("switch_load_balancing_loss_func").switch_load_balancing_loss_func
    rule = ReLU(EXPERTS, 2.0, l1_start=1e-3)
    for step in range(STEPS):
        logits = scores(step).flatten(0, 1)
        gates, assignment = router.l1_reg_load_balancing(SimpleNamespace(training=False), logits)
        l1 = loss(gates, assignment.sum(0), 2, rule.l1_start)
        routing = rule.route(scores(step), rule.init(), training=True)
        assert routing.loss is not None
        yield ours(routing, loss=routing.loss), Found(assignment, {"gates": gates, "loss": l1})


@against("top_p", Code("ZhenweiAn/Dynamic_MoE", "dynamic_moe", "modeling/modeling_moe.py"))
def top_p(code: Code, scores: Callable[[int], Tensor]) -> Iterator[tuple[Found, Found]]:
    sample = code.lift("top_p_sampling_batched_all_sequence").top_p_sampling_batched_all_sequence
    for p in (0.1, 0.4, 0.9):
        rule = TopP(EXPERTS, p=p)
        for step in range(STEPS):
            weights, chosen = sample(scores(step).flatten(0, 1).softmax(-1), top_p=p)
            assignment, gates = dense(chosen + 1, weights, EXPERTS + 1)  # −1 is none
            gates, assignment = gates[:, 1:], assignment[:, 1:]
            yield ours(rule.route(scores(step), rule.init(), training=True)), Found(assignment, {"gates": gates})


@against(
    "seq_top_k",
    Code("NVIDIA/Megatron-LM #6208", "seq_top_k", "seqtopk_routing.py"),
    "its selection alone, two functions copied without comments and types; in inference among the tokens so far",
)
def seq_top_k(code: Code, scores: Callable[[int], Tensor]) -> Iterator[tuple[Found, Found]]:
    select = code.lift("_per_key_cumcount", "_capped_per_sequence_budget_select")._capped_per_sequence_budget_select

    def theirs(rows: Tensor, most: int) -> Tensor:
        batch, time, experts = rows.shape
        of_token = torch.arange(batch).repeat_interleave(time)
        lengths = torch.full((batch,), time)
        selected: Tensor = select(rows.reshape(-1, experts), of_token, lengths, 2, most)
        return selected.view(rows.shape)

    for rule in (SeqTopK(EXPERTS, 2), SeqTopK(EXPERTS, 2, max_per_token=4), SeqTopK(EXPERTS, 2, gate="softmax")):
        most = rule.max_per_token or EXPERTS
        for step in range(STEPS):
            values = scores(step).softmax(-1) if rule.gate == "softmax" else scores(step)
            routing = rule.route(scores(step), rule.init(), training=True)
            yield Found(routing.assignment, {}), Found(theirs(values, most), {})
        so_far = torch.stack([theirs(values[:, : t + 1], most)[:, t] for t in range(TIME)], 1)
        yield Found(rule.route(scores(step), rule.init(), training=False).assignment, {}), Found(so_far, {})


RELEASE = Code("MasterGodzilla/Expert-Threshold-Routing", "release", "src/models/engines/common.py")


def against_release(rule: ExpertThreshold | ExpertChoice) -> Compare:
    """Train some steps in both; in the end route as in inference."""

    def compare(code: Code, scores: Callable[[int], Tensor]) -> Iterator[tuple[Found, Found]]:
        common = code.lift("ExpertEngineCommon").ExpertEngineCommon

        class Engine(common):  # type: ignore[misc, valid-type]
            training = True
            cutoff_ema_raw, cutoff_accum_sum = torch.zeros(EXPERTS), torch.zeros(EXPERTS)
            cutoff_ema_updates, cutoff_accum_count = torch.tensor([0]), torch.tensor([0])
            config = SimpleNamespace(
                granularity=1, expansion=EXPERTS, cutoff_ema_alpha=rule.decay,
                expert_capacity_factor=-1 if rule.slack is None else rule.slack,
            )  # fmt: skip

        engine, state = Engine(), rule.init()
        for step in range(2 * STEPS):
            engine.training = step < 2 * STEPS - 1
            warm = isinstance(rule, ExpertChoice) or step < rule.warmup_steps
            policy = "topk" if engine.training and warm else "threshold"
            plan = engine._build_routing_plan(policy, scores(step).flatten(0, 1), TOKENS, is_shared=False)
            assignment = plan["above_mask"]
            if plan["topk_indices"] is not None:
                taken = (
                    plan["k_actual"] if plan["k_actual"] is not None else torch.tensor(plan["topk_indices"].shape[1])
                )
                ranks = torch.arange(plan["topk_indices"].shape[1]).expand_as(plan["topk_indices"])
                inside = ranks < taken[..., None]
                assignment = torch.zeros(EXPERTS, TOKENS).scatter(1, plan["topk_indices"], inside.float()).bool().T
            engine.finalize_cutoff_accumulation()
            routing = rule.route(scores(step), state, training=engine.training)
            if engine.training:
                state = rule.update(state, routing.observation)
            gates = scores(step).flatten(0, 1).sigmoid() * assignment
            yield (
                ours(routing, cutoff=cutoff(state)),
                Found(assignment, {"gates": gates, "cutoff": engine._effective_cutoff()}),
            )

    return compare


OF_RELEASE: dict[str, ExpertThreshold | ExpertChoice] = {
    "expert_threshold, with bounds": ExpertThreshold(EXPERTS, 1, decay=0.9, warmup_steps=2, capacity_slack=0.5),
    "expert_threshold, without bounds": ExpertThreshold(EXPERTS, 1, decay=0.9, warmup_steps=2, capacity_slack=None),
    "expert_choice, batch": ExpertChoice(EXPERTS, 1, decay=0.9),
}
for name, of_release in OF_RELEASE.items():
    against(name, RELEASE, "training, then inference; it compares with ≥, which no random score meets")(
        against_release(of_release)
    )


# nanochat's trunk: the whole model on the same weights.

NANOCHAT = Code("karpathy/nanochat", "nanochat", "nanochat/gpt.py")
TRUNK_SIZES: dict[str, dict[str, Any]] = {  # windows are of 128 tokens
    "4 layers": {"layers": 4, "d_model": 128, "heads": 2, "kv_heads": 2, "vocab_size": 4096, "context": 256},
    "5 layers, grouped queries": {
        "layers": 5, "d_model": 96, "heads": 4, "kv_heads": 2, "vocab_size": 512, "context": 512
    },
}  # fmt: skip
NAMES = {  # ours to nanochat's, part by part
    "embed.weight": "transformer.wte.weight", "head.weight": "lm_head.weight", "residual_scalars": "resid_lambdas",
    "skip_scalars": "x0_lambdas", "smear_scalar": "smear_lambda", "backout_scalar": "backout_lambda",
}  # fmt: skip
IN_BLOCK = {
    "attention.value_gate": "attn.ve_gate", "attention.query": "attn.c_q", "attention.key": "attn.c_k",
    "attention.value": "attn.c_v", "attention.output": "attn.c_proj", "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}  # fmt: skip


def named_there(name: str) -> str:
    """Return nanochat's name of a parameter of ours."""
    if not name.startswith("blocks."):
        return NAMES.get(name, name)
    _, block, part = name.removesuffix(".weight").split(".", 2)
    if part == "attention.value_embed":
        return f"value_embeds.{block}.weight"
    return f"transformer.h.{block}.{IN_BLOCK[part]}.weight"


def against_nanochat(sizes: dict[str, Any]) -> Compare:
    """Compare logits, loss and gradients in float32; all weights are random, none zero."""

    def compare(code: Code, _scores: object) -> Iterator[tuple[Found, Found]]:
        assert code.path is not None
        prepare_nanochat(code.path, torch.float32)
        config = GPTConfig(rule=None, d_feed_forward=4 * sizes["d_model"], **sizes, **TRUNKS["nanochat"])
        theirs: Any = nanochat_model(vars(config), seed=0)
        torch.manual_seed(0)
        with torch.no_grad():
            for weight in theirs.parameters():
                weight.normal_(0, 0.3 if weight.ndim == 1 else weight.shape[-1] ** -0.5)
            theirs.resid_lambdas.add_(1)  # as in no plain trunk
        ours: Any = GPT(config)
        weights = {name: theirs.state_dict()[named_there(name)] for name in ours.state_dict()}
        assert len(weights) == len(theirs.state_dict()), "a weight of nanochat's has no name here"
        ours.load_state_dict(weights)
        tokens, targets = torch.randint(config.vocab_size, (2, 2, config.context))
        expected = theirs(tokens)
        theirs(tokens, targets).backward()
        loss = ours(tokens, targets).loss
        loss.backward()
        none = torch.zeros(0, dtype=torch.bool)
        gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
        for name, parameter in ours.named_parameters():
            yield Found(none, {"gradients": parameter.grad}), Found(none, {"gradients": gradients[named_there(name)]})
        found = {"logits": ours(tokens).logits, "loss": loss}
        yield Found(none, found), Found(none, {"logits": expected, "loss": theirs(tokens, targets)})
        for piece in TRUNKS["nanochat"]:  # a comparison that would not see a piece proves nothing
            without = GPT(replace(config, **{piece: TRUNKS["paper"][piece]}))
            without.load_state_dict({name: weights[name] for name in without.state_dict()})
            far = float(((without(tokens).logits - expected).abs().max() / expected.abs().max()).detach())
            assert far > 1e-3, f"logits without {piece} are within {far:.1g}"

    return compare


for size, of_trunk in TRUNK_SIZES.items():
    against(f"nanochat's trunk, {size}", NANOCHAT, "the whole model; without any one piece logits differ by over 1e-3")(
        against_nanochat(of_trunk)
    )


def make_scores(seed: int) -> Tensor:
    """Return scores (batch, time, experts) without ties, experts of different means and spreads."""
    scores = torch.randn(BATCH, TIME, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores * torch.linspace(0.5, 2, EXPERTS) + torch.linspace(-1, 1, EXPERTS)


def outcome(pairs: Iterator[tuple[Found, Found]]) -> dict[str, Any]:
    """Return how far two implementations are apart over all batches: pairs of token and expert, and by name the largest
    distance of numbers, relative to the largest number.
    """
    found: dict[str, Any] = {"equal": True, "batches": 0, "pairs": 0, "differing": 0}
    apart: dict[str, float] = {}
    for mine, theirs in pairs:
        found["batches"] += 1
        found["pairs"] += int(theirs.assignment.sum())
        found["differing"] += int((mine.assignment != theirs.assignment).sum())
        for name, expected in theirs.numbers.items():
            expected = expected.detach()
            distance = float(
                (mine.numbers[name].detach() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
            )
            apart[name] = max(apart.get(name, 0.0), distance)
    equal = not found["differing"] and all(distance <= 1e-5 for distance in apart.values())
    return found | {"equal": equal, "apart": apart}


def compare_all(paths: dict[str, Path | None]) -> list[dict[str, Any]]:
    rows = []
    for rule, published, compare, remark in COMPARISONS:
        row: dict[str, Any] = {"rule": rule, "code": published.name, "file": published.file}
        try:
            code = published.at(paths[published.option])
        except ValueError as reason:
            rows.append(row | {"left_out": str(reason)})
        else:
            rows.append(row | {"version": code.version, "remark": remark} | outcome(compare(code, make_scores)))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    head = ["rule", "published code", "version", "batches", "pairs", "differing", "distances", "remark"]
    lines = []
    for row in rows:
        code = f"{row['code']}, `{row['file']}`"
        found = [f"left out: {row['left_out']}", "", "", "", "", ""] if "left_out" in row else [
            row["version"], *(str(row[name]) for name in ("batches", "pairs", "differing")),
            ", ".join(f"{name} {distance:.1g}" for name, distance in row["apart"].items()), row["remark"],
        ]  # fmt: skip
        lines.append([row["rule"], code, *found])
    return f"""# Rules beside their published code

Made by `benchmarks/parity.py` on random scores of {BATCH} × {TIME} tokens and {EXPERTS} experts. `pairs` are the
token-expert pairs that the published code assigns, `differing` those on which the two disagree; distances of numbers
are relative to the largest.

{markdown(head, lines)}"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = sorted({each.code.option for each in COMPARISONS})
    for option in options:
        parser.add_argument(f"--{option.replace('_', '-')}", type=Path, metavar="PATH")
    parser.add_argument("--out", type=Path, help="folder for results.json and results.md")
    given = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    rows = compare_all({option: getattr(given, option) for option in options})
    dist.destroy_process_group()
    print(table(rows))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        record = {"torch": torch.__version__, "experts": EXPERTS, "batch": BATCH, "time": TIME, "comparisons": rows}
        (given.out / "results.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        (given.out / "results.md").write_text(table(rows))
    return int(not all(row.get("equal", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main())

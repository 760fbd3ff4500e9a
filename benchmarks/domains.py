"""Experts and domains: methods trained on a mixture of texts, and what their experts tell of a token's domain.

    python benchmarks/domains.py --out FOLDER --domain NAME=SOURCE --domain NAME=SOURCE …
        [--methods A,B,…] [--seeds N] [--megabytes 4] [--baseline METHOD] [-- OPTIONS OF et compare]

The mixture has equally much text of every domain's training split, documents in a random order, and a twentieth of it
is held out for validation. Every method sees the same tokens in the same order. Traces are over the domains' own
held-out text, and so are losses by domain, judged against the baseline under the same seed. Methods differ in the scope
in which load is balanced: a sequence, a batch, all batches, not at all.
Writes into --out the runs with domains.json beside their compare.json, the figures of et analyze, and domains.md.
Finished runs are kept, and the same command continues.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from bare import origin
from common import call, positive, run

from expert_threshold.analysis.judgement import MARGIN, chosen_baseline, shown
from expert_threshold.analysis.methods import find_runs, read_subjects
from expert_threshold.analysis.paired import paired
from expert_threshold.analysis.plain import array
from expert_threshold.analysis.sentences import listed
from expert_threshold.cli.compare import chosen_methods
from expert_threshold.compare import COMPARISON
from expert_threshold.data import open_held_out, open_source
from expert_threshold.data.sources import absolute
from expert_threshold.evaluation.results import RESULTS
from expert_threshold.files import read_json, replace_file, replace_json
from expert_threshold.routing import DENSE

METHODS = (
    "token_choice,token_choice_aux,token_choice_loss_free,expert_choice_sequence,expert_choice_batch,"
    "expert_threshold,quantile_balancing,seq_top_k"
)
FIGURES = ("specialisation", "specialisation_summary", "domain_shares", "load_balance")
MIXTURE, RECORD = "mixture.jsonl", "domains.json"
MIXED = "all"
"""The name of the mixture's own validation text among the domains."""


def training_text(source: str) -> list[str]:
    """Return the training documents of a source; of a question set, those of its train.jsonl."""
    questions = Path(source).expanduser() / "train.jsonl"
    if questions.is_file():
        return list(open_held_out(str(questions)).documents("validation"))
    return list(open_source(source).documents("train"))


def mix(domains: dict[str, str], most: int, path: Path) -> dict[str, int]:
    """Write documents of all domains in a random order, equally much of each; return the bytes of each domain.

    most: bytes of each domain, fewer if the smallest has less. Documents are cut into pieces of 2,000 characters, so
    that domains alternate within a batch.
    """
    texts: dict[str, list[str]] = {}
    for name, source in domains.items():
        chance = random.Random(name)
        documents = training_text(source)
        chance.shuffle(documents)
        texts[name] = [text[i : i + 2000] for text in documents for i in range(0, len(text), 2000)]
    whole = {name: sum(len(text.encode()) for text in pieces) for name, pieces in texts.items()}
    budget = min(most, *whole.values())
    taken: list[str] = []
    bytes_of: dict[str, int] = {}
    for name, pieces in texts.items():
        bytes_of[name] = 0
        for piece in pieces:
            if bytes_of[name] >= budget:
                break
            bytes_of[name] += len(piece.encode())
            taken.append(piece)
    random.Random(0).shuffle(taken)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in taken), encoding="utf-8")
    return bytes_of


def methods_of(out: Path, methods: list[str], domains: dict[str, str], seeds: int) -> dict[str, Any]:
    """Return each method's losses by domain and seed, and of its experts by seed what `traces` says."""
    traced = {seed: traces(path) for seed in range(seeds) if (path := out / "analysis" / f"seed_{seed}").is_dir()}
    subjects = read_subjects(find_runs([str(out / "runs")]))
    labels = {subject.folder.path.resolve(): subject.method for subject in subjects}
    found = {}
    for method in methods:
        losses: dict[str, dict[str, float]] = {name: {} for name in domains}
        experts: dict[str, Any] = {}
        for seed in range(seeds):
            path = out / "runs" / method / f"seed_{seed}"
            measured = read_json(path / RESULTS)["data"]
            for name, source in domains.items():
                losses[name][str(seed)] = measured[absolute(source)]["loss"]
            if (label := labels[path.resolve()]) in traced.get(seed, {}):
                experts[str(seed)] = traced[seed][label]
        found[method] = {"losses": losses, "experts": experts}
    return found


def traces(analysis: Path) -> dict[str, dict[str, Any]]:
    """Return what is said of each method's experts, by its label.

    bits: what an expert tells of a token's domain, in each layer. majority: the share of experts with more than half of
    their tokens from one domain. load_spread: the largest load over the mean, in the worst layer.
    """
    data = {name: read_json(analysis / f"{name}.json") for name in FIGURES}
    of = {name: {entry["method"]: entry for entry in found["methods"]} for name, found in data.items()}
    # (layers, experts)
    largest = {label: array(entry["shares"]).max(1) for label, entry in of["domain_shares"].items()}
    return {
        label: {
            "bits": entry["bits"],
            "majority": float((largest[label] > 0.5).mean()),
            "load_spread": max(of["load_balance"][label]["spread"]),
        }
        for label, entry in of["specialisation"].items()
    }


class Table(NamedTuple):
    """By method, losses by domain and seed, and of experts by seed what `traces` says. headline: texts and commit."""

    headline: str
    domains: list[str]
    losses: dict[str, dict[str, dict[int, float]]]
    experts: dict[str, dict[int, dict[str, Any]]]


def read_table(runs: Path) -> Table:
    """Return the table of the folder of runs. Raises ValueError if a run diverged."""
    record = read_json(runs / RECORD)
    domains = list(record["domains"])
    losses: dict[str, dict[str, dict[int, float]]] = {}
    experts: dict[str, dict[int, dict[str, Any]]] = {}
    for result in read_json(runs / COMPARISON.file)["runs"]:
        name, seed, row = result["method"], result["seed"], record["methods"].get(result["method"])
        if row is None:
            continue
        if result["loss"] is None:
            raise ValueError(f"{name} diverged under seed {seed}")
        of_name = losses.setdefault(name, {domain: {} for domain in (MIXED, *domains)})
        of_name[MIXED][seed] = result["loss"]
        for domain in domains:
            of_name[domain][seed] = row["losses"][domain][str(seed)]
        if str(seed) in row["experts"]:
            experts.setdefault(name, {})[seed] = row["experts"][str(seed)]
    size = next(iter(record["domains"].values())) / 1e6
    headline = f"{listed(domains)}: {size:.1f} MB of each; {record['date']}, commit {record['commit'][:8]}"
    return Table(headline, domains, losses, experts)


def to_markdown(table: Table, baseline: str) -> str:
    domains, losses = table.domains, table.losses
    lines = [
        table.headline,
        "",
        f"| method | seeds | validation loss | {' | '.join(domains)} |",
        "| --- |" + " ---: |" * (len(domains) + 2),
    ]
    for name, of_name in losses.items():
        means = [f"{fmean(of_name[domain].values()):.3f}" for domain in (MIXED, *domains)]
        lines.append(f"| {name} | {len(of_name[MIXED])} | {' | '.join(means)} |")
    lines += ["", f"| minus {baseline} | all | {' | '.join(domains)} |", "| --- |" + " ---: |" * (len(domains) + 1)]
    for name, of_name in losses.items():
        if name != baseline:
            cells = [difference(of_name[domain], losses[baseline][domain]) for domain in (MIXED, *domains)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "Differences under the same seed, with the 95 % interval of their mean.", ""]
    if not table.experts:
        return "\n".join(lines)
    bits = {name: {seed: fmean(one["bits"]) for seed, one in seeds.items()} for name, seeds in table.experts.items()}
    lines += [f"| method | bits | minus {baseline} | most of a layer | experts with a majority | max load / mean |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, seeds in table.experts.items():
        most = fmean(max(one["bits"]) for one in seeds.values())
        majority = fmean(one["majority"] for one in seeds.values())
        spread = fmean(one["load_spread"] for one in seeds.values())
        told = "" if name == baseline else difference(bits[name], bits.get(baseline, {}))
        cells = [f"{fmean(bits[name].values()):.3f}", told, f"{most:.3f}", f"{100 * majority:.0f} %", f"{spread:.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "Bits: information of a routed token's expert about its domain, averaged over layers, with equally many tokens "
        f"of every domain; at most {math.log2(len(domains)):.3g}. Experts with a majority: more than half of their "
        "tokens are of one domain. Routing is that of inference on held-out text; each number is a mean over seeds.",
        "",
    ]
    return "\n".join(lines)


def difference(losses: dict[int, float], base: dict[int, float]) -> str:
    """Return the mean difference over the seeds that both have, with its interval if there are two or more."""
    both = [value - base[seed] for seed, value in losses.items() if seed in base]
    return shown(paired(both, MARGIN) if both else None)


def baseline_among(methods: list[str], named: str | None) -> str:
    """Return the method to compare with. Raises ValueError if the named one takes no part."""
    preferred = "expert_threshold" if named is None and "expert_threshold" in methods else named or methods[0]
    return chosen_baseline(preferred, methods)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--domain", action="append", default=[], help="NAME=SOURCE; two or more")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--seeds", type=positive, default=1)
    parser.add_argument("--megabytes", type=positive, default=4, help="text of each domain")
    parser.add_argument("--baseline", help="the method compared with; expert_threshold, or the first if it is absent")
    parser.add_argument("--domain-tokens", type=positive, default=50_000, help="held-out tokens of each domain")
    parser.add_argument("options", nargs="*", help="options of et compare")
    return parser.parse_args()


def measure(arguments: argparse.Namespace, methods: list[str], domains: dict[str, str]) -> Path:
    """Train, evaluate and trace what is left, and return the folder of the runs."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    mixture, told = arguments.out / MIXTURE, arguments.out / "mixture.json"
    now = {"sources": domains, "megabytes": arguments.megabytes}
    if not told.exists():
        replace_json(told, now | {"bytes": mix(domains, arguments.megabytes * 1_000_000, mixture)})
    made = read_json(told)
    if {name: made.get(name) for name in now} != now:
        of = ", ".join(f"{name}={source}" for name, source in made.get("sources", {}).items())
        raise ValueError(
            f"--out {arguments.out}: its mixture is of {made.get('megabytes')} megabytes of each of {of or 'others'}; "
            "name these, or another --out"
        )
    runs: Path = arguments.out / "runs"
    call("compare", "quickstart", "--data", mixture, "--validation-fraction", 0.05, "--rules", ",".join(methods),
         "--seeds", arguments.seeds, "--sample-every", "none", "--out", runs, *arguments.options)  # fmt: skip
    texts = [word for source in domains.values() for word in ("--data", source)]
    call("evaluate", *sorted(runs.glob("*/seed_*")), "--no-validation", "--bundle", "none", *texts,
         "--eval-tokens", arguments.domain_tokens)  # fmt: skip
    names = [flag for domain in domains.items() for flag in ("--domain", "=".join(domain))]
    for seed in range(arguments.seeds):
        analysis = arguments.out / "analysis" / f"seed_{seed}"
        with_experts = [runs / method / analysis.name for method in methods if method != DENSE]
        if with_experts:
            call("analyze", *with_experts, "--figures", ",".join(FIGURES), *names, "--out", analysis)
    of_methods = methods_of(arguments.out, methods, domains, arguments.seeds)
    record = {**origin(), "domains": made["bytes"], "domain_tokens": arguments.domain_tokens, "methods": of_methods}
    replace_json(runs / RECORD, record)
    return runs


def main() -> None:
    arguments = parse()
    domains = dict(text.split("=", 1) for text in arguments.domain if "=" in text)
    if len(domains) < 2 or len(domains) != len(arguments.domain):
        raise ValueError("--domain NAME=SOURCE: name two domains or more, each by a name of its own")
    methods = chosen_methods(arguments.methods, "--methods")
    baseline = baseline_among(methods, arguments.baseline)
    table = read_table(measure(arguments, methods, domains))
    replace_file(arguments.out / "domains.md", to_markdown(table, baseline).encode())


if __name__ == "__main__":
    run(main, "interrupted; the same command continues")

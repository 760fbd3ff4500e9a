"""Experts and domains: methods trained on a mixture of texts, and what their experts tell of a token's domain.

    python benchmarks/domains.py --out FOLDER --domain NAME=SOURCE --domain NAME=SOURCE …
        [--methods A,B,…] [--seeds N] [--megabytes 4] [--baseline METHOD] [-- OPTIONS OF et compare]
    python benchmarks/domains.py --out FOLDER [--join domains.json …]

The mixture has equally much text of every domain's training split, documents in a random order, and a twentieth of it
is held out for validation. Every method sees the same tokens in the same order. Traces are over the domains' own
held-out text, and so are losses by domain, judged against the baseline under the same seed. Methods differ in the scope
in which load is balanced: a sequence, a batch, all batches, not at all.
Writes into --out the runs, the figures of et analyze, and domains.json and domains.md with a row for each method.
Finished runs are kept, and the same command continues. With --join it trains nothing and makes one table of several, of
which numbers of experts and steps may differ and are named then; with --out alone it makes domains.md anew.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from statistics import fmean
from typing import Any

from bare import origin
from common import call, machine, run

from expert_threshold.analysis.comparison import names_with_sizes, sizes
from expert_threshold.analysis.judgement import MARGIN, chosen_baseline, shown
from expert_threshold.analysis.methods import find_runs, read_subjects
from expert_threshold.analysis.paired import paired
from expert_threshold.analysis.plain import array
from expert_threshold.analysis.sentences import listed
from expert_threshold.compare import NOT_SHARED, SHARED
from expert_threshold.data import open_held_out, open_source
from expert_threshold.data.sources import absolute
from expert_threshold.evaluation.results import RESULTS
from expert_threshold.routing import DENSE
from expert_threshold.runs import RunFolder

METHODS = (
    "token_choice,token_choice_aux,token_choice_loss_free,expert_choice_sequence,expert_choice_batch,"
    "expert_threshold,quantile_balancing,seq_top_k"
)
FIGURES = ("specialisation", "specialisation_summary", "domain_shares", "load_balance")
MIXTURE = "mixture.jsonl"
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


def rows(out: Path, methods: list[str], domains: dict[str, str]) -> list[dict[str, Any]]:
    """Return each method's losses by seed, and of its experts by seed what `traces` says."""
    traced = {path.name.removeprefix("seed_"): traces(path) for path in sorted((out / "analysis").glob("seed_*"))}
    subjects = read_subjects(find_runs([str(out / "runs")]))
    labels = {subject.folder.path.resolve(): subject.method for subject in subjects}
    found = []
    for method in methods:
        losses: dict[str, dict[str, float]] = {name: {} for name in (MIXED, *domains)}
        named, steps = dict[str, str | None](), 0
        experts: dict[str, Any] = {}
        for path in sorted((out / "runs" / method).glob("seed_*")):
            seed, folder = path.name.removeprefix("seed_"), RunFolder.open(path)
            named, steps = sizes(folder.config), folder.config["train"]["steps"]
            validations = [r for r in folder.metrics.read() if r["split"] == "validation"]
            losses[MIXED][seed] = validations[-1]["loss"]
            measured = json.loads((path / RESULTS).read_text(encoding="utf-8"))["data"]
            for name, source in domains.items():
                losses[name][seed] = measured[absolute(source)]["loss"]
            if (label := labels[path.resolve()]) in traced.get(seed, {}):
                experts[seed] = traced[seed][label]
        found.append({"method": method, "sizes": named, "steps": steps, "losses": losses, "experts": experts})
    return found


def traces(analysis: Path) -> dict[str, dict[str, Any]]:
    """Return by method's label the bits that its experts tell of a token's domain in each layer, the share of experts
    with a majority of one domain, and the largest load over the mean."""
    data = {name: json.loads((analysis / f"{name}.json").read_text(encoding="utf-8")) for name in FIGURES}
    of = {name: {entry["method"]: entry for entry in found["methods"]} for name, found in data.items()}
    largest = {
        label: array(entry["shares"]).max(1) for label, entry in of["domain_shares"].items()
    }  # (layers, experts)
    return {
        label: {
            "bits": entry["bits"],
            "majority": float((largest[label] > 0.5).mean()),
            "load_spread": max(of["load_balance"][label]["spread"]),
        }
        for label, entry in of["specialisation"].items()
    }


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one result of several. A run that two parts have is taken from the first.

    Raises ValueError if mixtures, held-out tokens, or options differ other than those that may in et compare --join.
    """

    def shared(part: dict[str, Any]) -> dict[str, Any]:
        return {"domains": part["domains"], "domain_tokens": part["domain_tokens"], **part["budget"]}

    machines: list[Any] = []
    first, rows = parts[0], dict[tuple[Any, ...], Any]()
    for part in parts:
        machines += part["machine"] if isinstance(part["machine"], list) else [part["machine"]]
        for name, value in shared(part).items():
            if value != shared(first)[name]:
                raise ValueError(f"--join: {name}={value!r} differs from {shared(first)[name]!r} of the first")
        for row in part["methods"]:
            key = row["method"], *row["sizes"].values()
            whole = rows.setdefault(key, row)
            losses = {name: found | whole["losses"][name] for name, found in row["losses"].items()}
            rows[key] = whole | {"losses": losses, "experts": row["experts"] | whole["experts"]}
    return {**first, "machine": machines, "methods": list(rows.values())}


def read_result(path: Path) -> dict[str, Any]:
    """Return the content of a domains.json. Raises ValueError if it is missing or of another version."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; name the domains.json of a finished benchmark")
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "budget" not in result:
        raise ValueError(f"{path}: written by another version of this benchmark; run it again")
    return result


def baseline_among(methods: list[str], named: str | None) -> str:
    """Return the method to compare with. Raises ValueError if the named one takes no part."""
    preferred = "expert_threshold" if named is None and "expert_threshold" in methods else named or methods[0]
    return chosen_baseline(preferred, methods)


def named_rows(result: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the rows by their methods' names, and what the names leave out, as `names_with_sizes` does."""
    rows = result["methods"]
    names, usual = names_with_sizes([(row["method"], row["sizes"]) for row in rows])
    return dict(zip(names, rows, strict=True)), usual


def to_markdown(result: dict[str, Any], baseline: str) -> str:
    domains, (rows, usual), budget = list(result["domains"]), named_rows(result), result["budget"]
    per_step = budget["batch_size"] * budget["accumulation"] * budget["context"]
    tokens = listed([f"{per_step * steps:,}" for steps in sorted({row["steps"] for row in rows.values()})])
    machines = result["machine"] if isinstance(result["machine"], list) else [result["machine"]]
    cpus = listed(list(dict.fromkeys(here["cpu"] for here in machines)))
    lines = [
        f"{', '.join(domains)}: {next(iter(result['domains'].values())) / 1e6:.1f} MB of each; {tokens} "
        f"tokens{usual and f'; {usual}'}; {cpus}, torch {machines[0]['torch']}, {result['date']}, "
        f"commit {str(result['commit'])[:8]}",
        "",
        f"| method | seeds | validation loss | {' | '.join(domains)} |",
        "| --- |" + " ---: |" * (len(domains) + 2),
    ]
    for name, row in rows.items():
        means = [f"{fmean(row['losses'][domain].values()):.3f}" for domain in (MIXED, *domains)]
        lines.append(f"| {name} | {len(row['losses'][MIXED])} | {' | '.join(means)} |")
    base = rows[baseline]["losses"]
    lines += ["", f"| minus {baseline} | all | {' | '.join(domains)} |", "| --- |" + " ---: |" * (len(domains) + 1)]
    for name, row in rows.items():
        if name != baseline:
            cells = [difference(row["losses"][domain], base[domain]) for domain in (MIXED, *domains)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    of_experts = {name: row["experts"] for name, row in rows.items() if row["experts"]}
    bits = {name: {seed: fmean(one["bits"]) for seed, one in seeds.items()} for name, seeds in of_experts.items()}
    lines += ["", "Differences under the same seed, with the 95 % interval of their mean.", ""]
    if not of_experts:
        return "\n".join(lines)
    lines += [f"| method | bits | minus {baseline} | most of a layer | experts with a majority | max load / mean |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, seeds in of_experts.items():
        most, majority, spread = (
            fmean(of_seed(one) for one in seeds.values())
            for of_seed in (lambda one: max(one["bits"]), lambda one: one["majority"], lambda one: one["load_spread"])
        )
        told = "" if name == baseline else difference(bits[name], bits.get(baseline, {}))
        cells = [f"{fmean(bits[name].values()):.3f}", told, f"{most:.3f}", f"{100 * majority:.0f} %", f"{spread:.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "Bits: information of a routed token's expert about its domain, averaged over layers, with equally many tokens "
        f"of every domain; at most {math.log2(len(domains)):.3g}. Experts with a majority: more than half of their "
        "tokens are of one domain. Routing is that of inference, loads are of the validation text, and all are means "
        "over seeds.",
        "",
    ]
    return "\n".join(lines)


def difference(losses: dict[str, float], base: dict[str, float]) -> str:
    """Return the mean difference over the seeds that both have, with its interval if there are two or more."""
    both = [value - base[seed] for seed, value in losses.items() if seed in base]
    return shown(paired(both, MARGIN) if both else None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--domain", action="append", default=[], help="NAME=SOURCE; two or more")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--megabytes", type=float, default=4.0, help="text of each domain")
    parser.add_argument("--baseline", help="the method compared with; expert_threshold, or the first if it is absent")
    parser.add_argument("--domain-tokens", type=int, default=50_000, help="held-out tokens of each domain for its loss")
    parser.add_argument("--join", type=Path, nargs="+", default=[], help="domains.json of several, for one table")
    parser.add_argument("options", nargs="*", help="options of et compare")
    return parser.parse_args()


def measure(arguments: argparse.Namespace, domains: dict[str, str]) -> dict[str, Any]:
    """Train, evaluate and trace what is left, and return the result."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    mixture, sizes = arguments.out / MIXTURE, arguments.out / "mixture.json"
    if not sizes.exists():
        sizes.write_text(json.dumps(mix(domains, round(arguments.megabytes * 1e6), mixture)), encoding="utf-8")
    mixed = json.loads(sizes.read_text(encoding="utf-8"))
    if set(mixed) != set(domains):
        known = ", ".join(mixed)
        raise ValueError(f"--out {arguments.out}: its mixture is of {known}; name these, or another --out")
    runs = arguments.out / "runs"
    call("compare", "quickstart", "--data", mixture, "--validation-fraction", 0.05, "--rules", arguments.methods,
         "--seeds", arguments.seeds, "--sample-every", "none", "--out", runs, *arguments.options)  # fmt: skip
    texts = [word for source in domains.values() for word in ("--data", source)]
    call("evaluate", *sorted(runs.glob("*/seed_*")), "--no-validation", "--bundle", "none", *texts,
         "--eval-tokens", arguments.domain_tokens)  # fmt: skip
    names = [flag for domain in domains.items() for flag in ("--domain", "=".join(domain))]
    methods = json.loads((runs / "compare.json").read_text(encoding="utf-8"))["methods"]
    for seed in range(arguments.seeds):
        analysis = arguments.out / "analysis" / f"seed_{seed}"
        with_experts = [runs / method / analysis.name for method in methods if method != DENSE]
        if with_experts:
            call("analyze", *with_experts, "--figures", ",".join(FIGURES), *names, "--out", analysis)
    first = RunFolder.open(next(runs.glob("*/seed_0"))).config
    shared = {name: first["train"][name] for name in SHARED}
    shared |= {name: value for name, value in first["model"].items() if name not in NOT_SHARED}
    return {
        "machine": machine(),
        **origin(),
        "domains": mixed,
        "domain_tokens": arguments.domain_tokens,
        "budget": shared,
        "methods": rows(arguments.out, methods, domains),
    }


def main() -> None:
    arguments = parse()
    record = arguments.out / "domains.json"
    result = None
    if arguments.join:
        result = joined([read_result(path) for path in arguments.join])
    elif arguments.domain or not record.is_file():
        domains = dict(text.split("=", 1) for text in arguments.domain if "=" in text)
        if len(domains) < 2 or len(domains) != len(arguments.domain):
            raise ValueError("--domain NAME=SOURCE: name two domains or more, each by a name of its own")
        baseline_among(arguments.methods.split(","), arguments.baseline)
        result = measure(arguments, domains)
    if result is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    result = read_result(record)
    baseline = baseline_among(list(named_rows(result)[0]), arguments.baseline)
    (arguments.out / "domains.md").write_text(to_markdown(result, baseline), encoding="utf-8")


if __name__ == "__main__":
    run(main, "interrupted; the same command continues")

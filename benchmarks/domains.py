"""Experts and domains: methods trained on a mixture of texts, and what their experts tell of a token's domain.

    python benchmarks/domains.py --out FOLDER --domain NAME=SOURCE --domain NAME=SOURCE …
        [--methods A,B,…] [--seeds N] [--megabytes 4] [-- OPTIONS OF et compare]
    python benchmarks/domains.py --redraw --out FOLDER

The mixture has equally much text of every domain's training split, documents in a random order, and a twentieth of it
is held out for validation. Every method sees the same tokens in the same order. Traces are over the domains' own
held-out text. Methods differ in the scope in which load is balanced: a sequence, a batch, all batches, not at all.
Writes into --out the runs, the figures of et analyze, and domains.json and domains.md with a row for each method.
Finished runs are kept, and the same command continues.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

from bare import origin
from common import call, machine, run

from expert_threshold.analysis.methods import find_runs, read_subjects
from expert_threshold.analysis.plain import array
from expert_threshold.analysis.sentences import counted
from expert_threshold.data import open_held_out, open_source
from expert_threshold.runs import RunFolder

METHODS = (
    "token_choice,token_choice_aux,token_choice_loss_free,expert_choice_sequence,expert_choice_batch,"
    "expert_threshold,quantile_balancing,seq_top_k"
)
FIGURES = ("specialisation", "specialisation_summary", "domain_shares", "load_balance")
MIXTURE = "mixture.jsonl"


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


def rows(out: Path, methods: list[str]) -> list[dict[str, Any]]:
    """Return each method's losses over seeds, the information of its experts in bits, and what its experts hold."""
    data = {name: json.loads((out / "analysis" / f"{name}.json").read_text(encoding="utf-8")) for name in FIGURES}
    of = {name: {entry["method"]: entry for entry in found["methods"]} for name, found in data.items()}
    labels = {
        subject.folder.path.parent.name: subject.method for subject in read_subjects(find_runs([str(out / "runs")]))
    }
    found = []
    for method in methods:
        label, losses = labels[method], []
        for path in sorted((out / "runs" / method).glob("seed_*")):
            validations = [r for r in RunFolder.open(path).metrics.read() if r["split"] == "validation"]
            losses.append(validations[-1]["loss"])
        largest = array(of["domain_shares"][label]["shares"]).max(1)  # of each expert in each layer
        found.append(
            {
                "method": method,
                "losses": losses,
                "bits": of["specialisation"][label]["bits"],
                "majority": float((largest > 0.5).mean()),
                "load_spread": max(of["load_balance"][label]["spread"]),
            }
        )
    return found


def to_markdown(result: dict[str, Any]) -> str:
    here, domains = result["machine"], result["domains"]
    lines = [
        f"{', '.join(domains)}: {next(iter(domains.values())) / 1e6:.1f} MB of each; {result['tokens']:,} tokens, "
        f"{counted(result['seeds'], 'seed')}; {here['cpu']}, torch {here['torch']}, {result['date']}, "
        f"commit {str(result['commit'])[:8]}",
        "",
        "| method | validation loss | bits | most of a layer | experts with a majority | max load / mean |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["methods"]:
        loss = sum(row["losses"]) / len(row["losses"])
        bits = row["bits"]
        lines.append(
            f"| {row['method']} | {loss:.3f} | {sum(bits) / len(bits):.3f} | {max(bits):.3f} | "
            f"{100 * row['majority']:.0f} % | {row['load_spread']:.2f} |"
        )
    lines += [
        "",
        "Bits: information of a routed token's expert about its domain, averaged over layers, with equally many tokens "
        f"of every domain; at most {result['most_bits']:.3g}. Experts with a majority: more than half of their tokens "
        "are of one domain. Routing is that of inference, of the first seed; loads are of the validation text.",
        "",
    ]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--domain", action="append", default=[], help="NAME=SOURCE; two or more")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--megabytes", type=float, default=4.0, help="text of each domain")
    parser.add_argument("--redraw", action="store_true", help="make domains.md anew from domains.json")
    parser.add_argument("options", nargs="*", help="options of et compare")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    record = arguments.out / "domains.json"
    if not arguments.redraw:
        domains = dict(text.split("=", 1) for text in arguments.domain if "=" in text)
        if len(domains) < 2 or len(domains) != len(arguments.domain):
            raise ValueError("--domain NAME=SOURCE: name two domains or more, each by a name of its own")
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
        names = [flag for domain in domains.items() for flag in ("--domain", "=".join(domain))]
        call("analyze", runs, "--figures", ",".join(FIGURES), *names, "--out", arguments.out / "analysis")
        methods = json.loads((runs / "compare.json").read_text(encoding="utf-8"))["methods"]
        first = RunFolder.open(next(runs.glob("*/seed_0"))).config
        per_step = first["train"]["batch_size"] * first["train"]["accumulation"] * first["model"]["context"]
        result = {
            "machine": machine(),
            **origin(),
            "domains": mixed,
            "tokens": per_step * first["train"]["steps"],
            "seeds": arguments.seeds,
            "most_bits": math.log2(len(domains)),
            "methods": rows(arguments.out, methods),
        }
        record.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    result = json.loads(record.read_text(encoding="utf-8"))
    (arguments.out / "domains.md").write_text(to_markdown(result), encoding="utf-8")


if __name__ == "__main__":
    run(main, "interrupted; the same command continues")

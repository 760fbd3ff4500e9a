"""`benchmarks/domains.py`: its mixture, its table, and its errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cases import et, write_text
from expert_threshold.analysis.judgement import MARGIN, shown
from expert_threshold.analysis.paired import paired

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from benchmarks import domains


def test_a_mixture_has_equally_much_of_every_domain_cut_into_pieces(tmp_path: Path) -> None:
    sources = {letter: str(tmp_path / f"{letter}.jsonl") for letter in "xy"}
    for letter, path in sources.items():
        lines = [json.dumps({"text": letter * (3000 + n)}) for n in range(40)]
        Path(path).write_text("\n".join(lines) + "\n")
    sizes = domains.mix(sources, 9000, tmp_path / "mixture.jsonl")
    texts = [json.loads(line)["text"] for line in (tmp_path / "mixture.jsonl").read_text().splitlines()]
    assert max(map(len, texts)) == 2000
    for letter in "xy":
        assert sum(text.count(letter) for text in texts) == sizes[letter]
        assert 9000 <= sizes[letter] < 9000 + 2000  # the last piece is whole


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["a=a.jsonl"], "name two domains or more"),
        (["a=a.jsonl", "a=b.jsonl"], "name two domains or more, each by a name of its own"),
        (["a=a.jsonl", "c=b.jsonl"], "its mixture is of 4 megabytes of each of a=a.jsonl, b=b.jsonl; name these, or"),
        (["a=a.jsonl", "b=c.jsonl"], "its mixture is of 4 megabytes of each of a=a.jsonl, b=b.jsonl; name these, or"),
    ],
)
def test_other_domains_than_those_of_the_mixture_are_refused(
    named: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mixture.json").write_text('{"sources": {"a": "a.jsonl", "b": "b.jsonl"}, "megabytes": 4}')
    given = [word for name in named for word in ("--domain", name)]
    monkeypatch.setattr(sys, "argv", ["domains.py", "--out", str(tmp_path), *given])
    with pytest.raises(ValueError, match=message):
        domains.main()
    assert [path.name for path in tmp_path.iterdir()] == ["mixture.json"]


DOMAINS = ("code", "prose")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of runs of two methods under two seeds; losses of domains are those of the mixture, less and plus 1."""
    (folder := tmp_path / "runs").mkdir()
    methods: dict[str, Any] = {}
    made = []
    for method, offset in (("dense", 0.25), ("expert_threshold", 0.0)):
        row = methods.setdefault(method, {"losses": {domain: {} for domain in DOMAINS}, "experts": {}})
        for seed in (0, 1):
            loss = 3 + offset + seed / 8 * (method == "dense")
            made.append({"method": method, "seed": seed, "loss": loss})
            row["losses"]["code"][str(seed)], row["losses"]["prose"][str(seed)] = loss - 1, loss + 1
            if method != "dense":
                row["experts"][str(seed)] = {"bits": [0.5, 0.7 + seed], "majority": 0.25, "load_spread": 1.5}
    sizes = dict.fromkeys(DOMAINS, 1_000_000)
    record = {"date": "2026-11-24", "commit": "0123456789", "domain_tokens": 50_000, "domains": sizes}
    (folder / "compare.json").write_text(json.dumps({"runs": made}))
    (folder / "domains.json").write_text(json.dumps(record | {"methods": methods}))
    return folder


def test_methods_are_judged_on_every_domain_under_the_same_seed(runs: Path) -> None:
    table = domains.read_table(runs)
    assert table.headline == "code and prose: 1.0 MB of each; 2026-11-24, commit 01234567"
    told = shown(paired([0.25, 0.375], MARGIN))
    text = domains.to_markdown(table, "expert_threshold")
    assert f"| dense | {told} | {told} | {told} |" in text
    assert "| dense | 2 | 3.312 | 2.312 | 4.312 |" in text
    assert "| expert_threshold | 0.850 |  | 1.200 | 25 % | 1.50 |" in text
    assert "| dense | 0." not in text.split("| method | bits")[1]  # it has no experts


def test_a_run_that_diverged_is_named(runs: Path) -> None:
    record = json.loads((runs / "compare.json").read_text())
    record["runs"][-1]["loss"] = None
    (runs / "compare.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="expert_threshold diverged under seed 1"):
        domains.read_table(runs)


def test_experts_are_traced_under_every_seed(tmp_path: Path) -> None:
    """`methods_of` reads what et evaluate and et analyze write."""
    source = str(tmp_path / "a.jsonl")
    text = write_text(tmp_path / "text.jsonl")
    sizes = ["--vocab-size", 270, "--context", 32, "--layers", 2, "--d-model", 32, "--heads", 2, "--batch-size", 2]
    made = ["compare", "tiny", "--data", text, "--rules", "dense,expert_threshold", "--seeds", 2, "--steps", 2]
    assert et(*made, *sizes, "--eval-tokens", 64, "--threads", 1, "--out", tmp_path / "runs") == 0
    for seed in (0, 1):
        analysis = tmp_path / "analysis" / f"seed_{seed}"
        analysis.mkdir(parents=True)
        shares = [[[0.6, 0.4], [0.4, 0.6]]]  # one layer, two domains, two experts
        for name, entry in (
            ("specialisation", {"bits": [0.5 + seed]}),
            ("specialisation_summary", {}),
            ("domain_shares", {"shares": shares}),
            ("load_balance", {"spread": [1.5, 2.5 + seed]}),
        ):
            content = {"methods": [{"method": "ET no warmup", **entry}]}
            (analysis / f"{name}.json").write_text(json.dumps(content))
        for method in ("dense", "expert_threshold"):
            measured = {"data": {source: {"loss": 3.0 + seed}}}
            (tmp_path / "runs" / method / f"seed_{seed}" / "evaluation.json").write_text(json.dumps(measured))
    found = domains.methods_of(tmp_path, ["dense", "expert_threshold"], {"a": source}, 2)
    assert found["dense"] == {"losses": {"a": {"0": 3.0, "1": 4.0}}, "experts": {}}
    traced = {str(seed): {"bits": [0.5 + seed], "majority": 1.0, "load_spread": 2.5 + seed} for seed in (0, 1)}
    assert found["expert_threshold"]["experts"] == traced


def test_the_baseline_is_checked_before_training_and_is_expert_threshold_where_it_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert domains.baseline_among(["dense", "expert_threshold"], None) == "expert_threshold"
    assert domains.baseline_among(["relu", "dense"], None) == "relu"
    given = ["--domain", "a=a.jsonl", "--domain", "b=b.jsonl", "--methods", "relu", "--baseline", "dense"]
    monkeypatch.setattr(sys, "argv", ["domains.py", "--out", str(tmp_path / "out"), *given])
    with pytest.raises(ValueError, match="--baseline dense: does not take part; use one of relu"):
        domains.main()
    assert not (tmp_path / "out").exists()

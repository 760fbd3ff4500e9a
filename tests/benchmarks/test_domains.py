"""`benchmarks/domains.py`: its mixture, its table, joined tables, and its errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

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
        (["a=a.jsonl", "c=b.jsonl"], "its mixture is of a, b; name these, or another --out"),
    ],
)
def test_other_domains_than_those_of_the_mixture_are_refused(
    named: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mixture.json").write_text('{"a": 1, "b": 1}')
    given = [word for name in named for word in ("--domain", name)]
    monkeypatch.setattr(sys, "argv", ["domains.py", "--out", str(tmp_path), *given])
    with pytest.raises(ValueError, match=message):
        domains.main()
    assert [path.name for path in tmp_path.iterdir()] == ["mixture.json"]


def result(methods: dict[str, dict[str, float]], **changed: Any) -> dict[str, Any]:
    """A result of two domains whose losses are those of the mixture, less and plus 1. methods: its losses by seed."""
    rows = []
    for method, losses in methods.items():
        each = {"all": 0.0, "code": -1.0, "prose": 1.0}
        by_name = {name: {seed: loss + more for seed, loss in losses.items()} for name, more in each.items()}
        sizes = {"experts": None if method == "dense" else "16 experts of 8", "steps": "4 steps"}
        traced = {
            seed: {"bits": [loss - 2.5, loss - 2.3], "majority": 0.25, "load_spread": 1.5}
            for seed, loss in losses.items()
        }
        experts = {} if method == "dense" else traced
        rows.append({"method": method, "sizes": sizes, "steps": 4, "losses": by_name, "experts": experts})
    here = {"cpu": "a processor", "torch": "2.13.0", "threads": 1}
    of_all = {
        "machine": here,
        "date": "2026-11-24",
        "commit": "0123456789",
        "domain_tokens": 50_000,
        "budget": {"batch_size": 8, "accumulation": 1, "context": 512},
    }
    return of_all | {"domains": {"code": 1_000_000, "prose": 1_000_000}, "methods": rows} | changed


def test_the_table_judges_each_domain_under_the_same_seed() -> None:
    losses = {"dense": {"0": 3.1, "1": 3.3}, "expert_threshold": {"0": 3.0, "1": 3.18}, "relu": {"0": 3.1, "1": 3.3}}
    text = domains.to_markdown(result(losses), "expert_threshold")
    assert "| dense | 2 | 3.200 | 2.200 | 4.200 |" in text
    assert "| dense | +0.110 ± 0.127 | +0.110 ± 0.127 | +0.110 ± 0.127 |" in text  # t(1) = 12.706, error 0.01
    assert "| expert_threshold | 0.690 |  | 0.790 | 25 % | 1.50 |" in text
    assert "| relu | 0.800 | +0.110 ± 0.127 | 0.900 | 25 % | 1.50 |" in text
    assert "| dense | 0" not in text  # it has no experts


def test_results_are_joined_by_method_and_seed() -> None:
    here = result({"dense": {"0": 3.1}, "expert_threshold": {"0": 3.0}})
    there = result({"dense": {"0": 9.9, "1": 3.3}, "relu": {"1": 4.0}}, machine={"cpu": "another", "torch": "2.13.0"})
    whole = domains.joined([here, there])
    assert {row["method"]: row["losses"]["all"] for row in whole["methods"]} == {
        "dense": {"0": 3.1, "1": 3.3},
        "expert_threshold": {"0": 3.0},
        "relu": {"1": 4.0},
    }
    text = domains.to_markdown(whole, "expert_threshold")
    assert "a processor and another" in text
    assert "| dense | +0.100 | +0.100 | +0.100 |" in text  # of the seed that both have
    assert "| relu | – | – | – |" in text
    again = domains.joined([whole, here])
    assert [machine["cpu"] for machine in again["machine"]] == ["a processor", "another", "a processor"]
    del here["methods"][1]["experts"]["0"]
    there = result({"expert_threshold": {"0": 9.9}})
    assert domains.joined([here, there])["methods"][1]["experts"] == there["methods"][0]["experts"]  # traced elsewhere
    with pytest.raises(ValueError, match="--join: domain_tokens=1 differs from 50000 of the first"):
        domains.joined([here, result({}, domain_tokens=1)])
    with pytest.raises(ValueError, match="--join: context=256 differs from 512 of the first"):
        domains.joined([here, result({}, budget=here["budget"] | {"context": 256})])


def test_joined_rows_name_the_experts_and_steps_in_which_they_differ() -> None:
    here, longer = (result({"dense": {"0": loss}, "expert_threshold": {"0": 3.0}}) for loss in (3.1, 2.9))
    for row in longer["methods"]:
        row |= {"steps": 5, "sizes": row["sizes"] | {"steps": "5 steps"}}
    longer["methods"][1] |= {"steps": 4, "sizes": {"experts": "64 experts of 2", "steps": "4 steps"}}
    text = domains.to_markdown(domains.joined([here, longer]), "expert_threshold")
    assert "16,384 and 20,480 tokens; 16 experts of 8 and 4 steps where no other is named" in text
    assert "| dense | +0.100 |" in text
    assert "| dense (5 steps) | −0.100 |" in text
    assert "| expert_threshold (64 experts of 2) | 0.000 |" in text


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--join", "missing.json"], "missing.json does not exist"),
        (["--join", "old.json"], "old.json: written by another version"),
        (["--join", "new.json", "--baseline", "expert_treshold"], "--baseline expert_treshold: does not take part"),
    ],
)
def test_a_table_that_cannot_be_made_is_refused(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.json").write_text('{"methods": []}')
    Path("new.json").write_text(json.dumps(result({"dense": {"0": 3.1}})))
    monkeypatch.setattr(sys, "argv", ["domains.py", "--out", "out", *options])
    with pytest.raises(ValueError, match=said):
        domains.main()

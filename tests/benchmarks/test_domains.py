"""`benchmarks/domains.py`: its mixture, its table, joined tables, and its errors."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from expert_threshold.analysis.judgement import MARGIN, shown
from expert_threshold.analysis.paired import paired
from expert_threshold.cli import main as et

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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two folders `runs` of et compare: dense and expert threshold under two seeds, and longer dense. Do not change."""
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text.jsonl"
    words = ["def", "f", "(", "x", ")", ":", "return", "the", "sum", "of", "all", "that", "was", "said", "before"]
    chance = random.Random(0)
    documents = [" ".join(chance.choices(words, k=300)) for _ in range(40)]
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    sizes = ["--vocab-size", "270", "--context", "32", "--layers", "2", "--d-model", "32", "--heads", "2"]
    options = [*sizes, "--batch-size", "2", "--eval-tokens", "64", "--threads", "1"]
    made = {}
    for name, rules, steps in (("both", "dense,expert_threshold", "2"), ("longer", "dense", "3")):
        made[name] = folder / name
        call = ["compare", "tiny", "--data", str(text), "--rules", rules, "--seeds", "2", "--steps", steps, *options]
        assert et([*call, "--out", str(made[name])]) == 0
    return made


@pytest.fixture
def folders(trained: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """Copies of them without the runs, with losses of domains that are those of the mixture, less and plus 1."""
    for name, path in trained.items():
        (tmp_path / name).mkdir()
        shutil.copy(path / "compare.json", tmp_path / name)
        methods: dict[str, Any] = {}
        for run in json.loads((path / "compare.json").read_text())["runs"]:
            row = methods.setdefault(run["method"], {"losses": {domain: {} for domain in DOMAINS}, "experts": {}})
            seed = str(run["seed"])
            row["losses"]["code"][seed], row["losses"]["prose"][seed] = run["loss"] - 1, run["loss"] + 1
            if run["method"] != "dense":
                row["experts"][seed] = {"bits": [0.5, 0.7 + run["seed"]], "majority": 0.25, "load_spread": 1.5}
        sizes = dict.fromkeys(DOMAINS, 1_000_000)
        record = {"date": "2026-11-24", "commit": "0123456789", "domain_tokens": 50_000, "domains": sizes}
        (tmp_path / name / "domains.json").write_text(json.dumps(record | {"methods": methods}))
    return {name: tmp_path / name for name in trained}


def changed(folder: Path, **fields: Any) -> None:
    path = folder / "domains.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_rows_of_two_folders_are_named_and_judged_under_the_same_seed(folders: dict[str, Path]) -> None:
    table = domains.read_table([str(folders["longer"]), str(folders["both"])])
    assert list(table.losses) == ["dense (3 steps)", "dense", "expert_threshold"]
    assert table.headline.startswith("code and prose: 1.0 MB of each; 2 steps where no other is named; ")
    assert table.headline.endswith(", 2026-11-24, measured at 01234567")
    base, other = table.losses["expert_threshold"], table.losses["dense"]
    apart = [other["all"][seed] - base["all"][seed] for seed in (0, 1)]
    for domain, more in (("all", 0), ("code", -1), ("prose", 1)):
        assert other[domain][1] == pytest.approx(other["all"][1] + more)
    told = shown(paired(apart, MARGIN))
    text = domains.to_markdown(table, "expert_threshold")
    assert f"| dense | {told} | {told} | {told} |" in text
    assert "| expert_threshold | 0.850 |  | 1.200 | 25 % | 1.50 |" in text
    assert "| dense | 0." not in text.split("| method | bits")[1]  # it has no experts


def test_a_run_that_two_folders_have_is_taken_from_the_first(folders: dict[str, Path], tmp_path: Path) -> None:
    again = Path(shutil.copytree(folders["both"], tmp_path / "again"))
    methods = json.loads((again / "domains.json").read_text())["methods"]
    before = methods["dense"]["losses"]["code"]["0"]
    methods["dense"]["losses"]["code"]["0"] = 9.9
    methods["expert_threshold"]["experts"]["0"]["majority"] = 0.9
    changed(again, methods=methods)
    table = domains.read_table([str(folders["both"]), str(again)])
    assert table.losses["dense"]["code"][0] == before
    assert table.experts["expert_threshold"][0]["majority"] == 0.25
    table = domains.read_table([str(again), str(folders["both"])])
    assert table.losses["dense"]["code"][0] == 9.9


def test_the_table_is_written_whole_or_not_at_all(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = ["--join", str(folders["both"]), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["domains.py", *join, "--baseline", "relu"])
    with pytest.raises(ValueError, match="--baseline relu: does not take part; use one of dense, expert_threshold"):
        domains.main()
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(sys, "argv", ["domains.py", *join])
    domains.main()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["domains.md"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"domain_tokens": 1}, "domain_tokens=1 differs from 50000 of"),
        ({"domains": {"code": 2, "prose": 2}}, "domains="),
        ({"domains": {}}, r"domains\.json: damaged \(it is empty\); restore it from a copy, or repeat the benchmark"),
        ({"methods": {"dense": {}}}, r"domains\.json: damaged \(no 'losses'\)"),
        ({"methods": None}, r"domains\.json: damaged"),
    ],
)
def test_parts_that_do_not_fit_or_are_damaged_are_refused(
    fields: dict[str, Any], message: str, folders: dict[str, Path]
) -> None:
    changed(folders["longer"], **fields)
    with pytest.raises(ValueError, match=message):
        domains.read_table([str(folders["both"]), str(folders["longer"])])
    (folders["longer"] / "domains.json").unlink()
    with pytest.raises(ValueError, match=r"domains\.json does not exist; name the folder `runs`"):
        domains.read_table([str(folders["both"]), str(folders["longer"])])


def test_a_run_that_diverged_is_named(folders: dict[str, Path]) -> None:
    path = folders["both"] / "compare.json"
    record = json.loads(path.read_text())
    record["runs"][-1]["loss"] = None
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="expert_threshold diverged under seed 1"):
        domains.read_table([str(folders["both"])])


def test_experts_are_traced_under_every_seed(trained: dict[str, Path], tmp_path: Path) -> None:
    """`methods_of` reads what et evaluate and et analyze write."""
    source = str(tmp_path / "a.jsonl")
    (tmp_path / "runs").symlink_to(trained["both"])
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
            (trained["both"] / method / f"seed_{seed}" / "evaluation.json").write_text(json.dumps(measured))
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

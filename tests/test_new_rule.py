"""A rule of another distribution, `examples/new_rule`: installed, it is taken like one of ours by every command."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from cases import et, said, write_text
from commands import Refused, lines, read, run_python
from expert_threshold.cli.run_options import resolve_run
from expert_threshold.routing import RULES
from expert_threshold.runs import RunFolder, load_model

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "new_rule"
SIZES = "--layers 2 --d-model 32 --model.heads 2 --model.kv-heads 2 --model.d-expert 16 --vocab-size 270 --context 32"
LOOP = "--eval-tokens 256 --batch-size 4 --sample-every none --log-every 2 --threads 1 --dtype float32"
TINY = f"tiny {SIZES} --num-experts 4 --experts-per-token 1.5 {LOOP}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the example is installed into."""
    pytest.importorskip("hatchling", reason="needs hatchling: pip install -e '.[dev]'")
    place = tmp_path_factory.mktemp("site")
    source = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "new_rule")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--target", str(place)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, timeout=300)
    return place


@pytest.mark.timeout(600)
def test_installed_the_rule_is_known_by_its_entry_point_and_its_own_tests_pass(site: Path, tmp_path: Path) -> None:
    plan = run_python("-m", "expert_threshold", "plan", *f"{TINY} --rule min_p --json".split(), path=[site])
    assert json.loads(plan)["rule"] == "min_p"
    tests = shutil.copy(EXAMPLE / "test_min_p_rule.py", tmp_path)
    run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), cwd=tmp_path, path=[site])


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        patch.setitem(RULES._rules, "min_p", __import__("min_p_rule").MinP)  # type: ignore[attr-defined]
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "corpus.jsonl")


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps. No test may change it."""
    path = tmp_path_factory.mktemp("runs") / "run"
    often = "--rule min_p --steps 6 --eval-every 6 --checkpoint-every 3"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert et("train", *TINY.split(), *often.split(), "--data", corpus, "--out", path) == 0
    assert "rule min_p among 4 experts, 1.5 per token" in said.getvalue()
    return path


def say(line: str) -> str:
    """Return what a command prints."""
    return said(*shlex.split(line))


def ps(run: Path) -> list[float]:
    return [line["layers"]["1"]["p"] for line in lines(run / "metrics.jsonl") if line["split"] == "train"]


def same_weights(a: Path, b: Path) -> bool:
    one, other = (load_model(path)[0].state_dict() for path in (a, b))
    return one.keys() == other.keys() and all(torch.equal(other[name], value) for name, value in one.items())


def test_it_is_planned_and_its_options_are_helped_with_and_checked(refused: Refused) -> None:
    plan = json.loads(say(f"plan {TINY} --rule min_p --steps 6 --json"))
    assert plan["pool"] == 4 * 32  # which p is moved by
    assert plan["parameters"]["routed_experts"] == 4 * 2 * 16 * 32
    assert plan["params_total"] - plan["params_active"] == (4 - 1.5) * 2 * 16 * 32
    text = " ".join(say("train --rule min_p --help").split())
    assert "--rule.p-rate FLOAT Step u of log p, as a share of the error of the log of the mean fanout." in text
    for options, words in (
        ("min_p --rule.p-rate 7", "rule.p_rate: expected a number of at least 0 and at most 1, not 7"),
        ("min_p --rule.decay 0.5", "rule min_p has no such option"),
        ("token_choice --rule.p-rate 0.5", "min_p"),
    ):
        refused(["plan", "tiny", "--rule", *options.split()], words)


def test_it_is_trained_resumed_and_begun_from(run: Path, corpus: Path, tmp_path: Path) -> None:
    options = {"num_experts": 4, "experts_per_token": 1.5, "p_start": 0.5, "p_rate": 0.5}  # scaled to a short run
    assert RunFolder.open(run).section("rule") == {"name": "min_p"} | options
    assert len(set(ps(run))) == 3, "p does not move"
    again, after = shutil.copytree(run, tmp_path / "again"), tmp_path / "after"
    shutil.rmtree(again / "checkpoints" / "step_000006")
    say(f"train --resume {again}")
    assert same_weights(run, again)
    said = say(f"train --init-from {run} --steps 2 {LOOP} --data {corpus} --rule.p-start 0.9 --out {after}")
    assert "the state of its rule is loaded" in said
    assert abs(ps(after)[0] - ps(run)[-1]) < abs(ps(after)[0] - 0.9)
    assert resolve_run({"init_from": str(run), "train.steps": 100}).model.rule.p_rate == 0.3


def test_it_is_compared_and_swept(corpus: Path, tmp_path: Path) -> None:
    table = say(f"compare {TINY} --data {corpus} --rules min_p,dense --steps 4 --eval-every 4 --out {tmp_path / 'a'}")
    assert re.search(r"^ min_p ", table, re.MULTILINE), table
    pytest.importorskip("optuna", reason="needs the extra sweep")
    trial = f"--methods min_p --steps 2 --eval-every 2 --trials 1 --space 'rule.p_rate=0.1|0.5' --out {tmp_path / 'b'}"
    say(f"sweep {TINY} --data {corpus} {trial}")
    assert read(tmp_path / "b" / "min_p" / "best.json")["rule"]["name"] == "min_p"


def test_it_is_evaluated_and_generated_from_and_has_no_cutoffs(run: Path, refused: Refused) -> None:
    [found] = json.loads(say(f"evaluate {run} --eval-tokens 256 --dtype float32 --json"))
    assert found["validation"]["loss"] == lines(run / "metrics.jsonl")[-1]["loss"]
    greedy = f"generate {run} --prompt the --max-tokens 6 --temperature 0"
    assert say(greedy) in say(f"{greedy} --show-routing")
    for command in (["evaluate", run, "--rates", 1], ["calibrate", run, "--to", run / "new"]):
        refused(command, "min_p, which has no cutoffs")
    refused(["generate", run, "--rate", 1], "min-p does not have")


def test_it_is_served(run: Path) -> None:
    pytest.importorskip("uvicorn", reason="needs the extra serve")
    from starlette.testclient import TestClient

    with mock.patch("expert_threshold.serve.connections.run_server") as run_server:
        assert et("serve", run, "--port", 0) == 0
    with TestClient(run_server.call_args.args[0], base_url="http://127.0.0.1") as client:
        [facts] = client.get("/explorer/runs").json()["runs"]
        assert (facts["rule"], facts["experts_per_token"], facts["dial"]) == ("min_p", 1.5, None)
        fields = {"model": "run", "prompt": "the", "max_tokens": 6, "temperature": 0}
        assert client.post("/v1/completions", json=fields).json()["choices"][0]["text"]
        events = client.post("/explorer/read", json={"run": "run", "text": "the cat"}).text.split("\n\n")
    layer: dict[str, Any] = json.loads(events[1].removeprefix("data: "))["tokens"][0]["layers"][0]
    assert len(layer["scores"]) == 4
    assert 0 < sum(layer["gates"]) <= 1.00001


def test_it_is_exported_imported_and_analyzed(run: Path, drawn: None, tmp_path: Path) -> None:
    say(f"export {run} --to {tmp_path / 'hf'}")
    assert re.search("min[-_]p", (tmp_path / "hf" / "README.md").read_text())
    say(f"import {tmp_path / 'hf'} --out {tmp_path / 'again'}")
    assert same_weights(run, tmp_path / "again")
    pytest.importorskip("matplotlib", reason="needs the extra viz")
    out, figures = tmp_path / "analysis", "loss_by_method,load_balance,fanout_by_loss"
    say(f"analyze {run} --tokens 200 --out {out} --figures {figures}")
    text = re.sub(r"<svg.*?</svg>|<style.*?</style>|<[^>]*>", " ", (out / "report.html").read_text(), flags=re.DOTALL)
    assert "min-p" in text
    assert "dense" not in text


def test_not_a_line_of_the_package_knows_the_rule() -> None:
    for path in (ROOT / "src").rglob("*"):
        if path.suffix in (".py", ".js", ".html", ".cpp", ".h"):
            text = path.read_text(encoding="utf-8").lower()
            for sampling in ('("top_p", "min_p")', '"min_p": zero'):  # parameters of sampling have the same name
                text = text.replace(sampling, "")
            assert not re.search("min[-_]?p\\b", text), path

"""Takes the rule `min_p` of another distribution through commands, in one process: FOLDER STEP…

Those after `train` are of the run that it makes. Each step that passes prints
its name.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cases import write_text
from expert_threshold.analysis import page
from expert_threshold.cli import main
from expert_threshold.cli.run_options import resolve_run
from expert_threshold.routing import RULES
from expert_threshold.runs import RunFolder, load_model

FOLDER = Path(sys.argv[1])
CORPUS = FOLDER / "corpus.jsonl"
SIZES = (
    "--layers 2 --d-model 32 --model.heads 2 --model.kv-heads 2 --model.d-expert 16 --vocab-size 270 --context 32 "
    "--num-experts 4"
)
LOOP = (
    "--eval-tokens 256 --batch-size 4 --eval-every none --sample-every none --log-every 2 --threads 1 --dtype float32"
)
WHAT = f"tiny {SIZES} --experts-per-token 1.5 {LOOP} --data {CORPUS}"
MIN_P = f"{WHAT} --rule min_p"
RUN = FOLDER / "run"
IDS = torch.randint(269, (2, 24), generator=torch.Generator().manual_seed(0))


def et(line: str, code: int = 0) -> str:
    """Run a command and return what it printed, stderr last."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            got = main(line.split())
        except SystemExit as left:  # --help
            got = int(left.code or 0)
    text = out.getvalue() + err.getvalue()
    assert got == code, f"et {line}: exit code {got}\n{text}"
    return text


def refused(line: str, words: str) -> None:
    told = et(line, 2)
    assert told.count("\n") == 1, told
    assert words in told, told


def metrics(run: Path, split: str) -> list[dict[str, Any]]:
    return [record for record in RunFolder.open(run).metrics.read() if record["split"] == split]


def rule_of(run: Path) -> dict[str, Any]:
    record: dict[str, Any] = RunFolder.open(run).section("rule")
    return record


def state_of(run: Path) -> dict[str, torch.Tensor]:
    return load_model(run)[0].state_dict()


def rule_options_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the run that `et train` would make of these options."""
    return asdict(resolve_run(given).model.rule)  # type: ignore[call-overload, no-any-return]


def plan() -> None:
    told = json.loads(et(f"plan {MIN_P} --steps 6 --json"))
    assert told["rule"] == "min_p"
    assert told["pool"] == 4 * 32  # which p is moved by
    assert told["parameters"]["routed_experts"] == 4 * 2 * 16 * 32
    assert told["params_total"] - told["params_active"] == (4 - 1.5) * 2 * 16 * 32
    assert "min_p" in et(f"plan {MIN_P} --steps 6 --gpus 2")


def help_and_nonsense() -> None:
    text = " ".join(et("train --rule min_p --help").split())
    assert "--rule.p-rate FLOAT Step u of log p, as a share of the error of the log of the mean fanout." in text
    refused(f"train {MIN_P} --rule.p-rate 7", "rule.p_rate: expected a number of at least 0 and at most 1, not 7")
    refused(f"train {MIN_P} --rule.p-rate much", "rule.p_rate: expected a number")
    refused(f"train {MIN_P} --rule.decay 0.5", "rule min_p has no such option")
    refused(f"train {WHAT} --rule token_choice --experts-per-token 1 --rule.p-rate 0.5", "min_p")


def train() -> None:
    told = et(f"train {MIN_P} --steps 6 --eval-every 6 --checkpoint-every 3 --sample-every 6 --out {RUN}")
    assert "rule min_p among 4 experts, 1.5 per token" in told, told
    assert rule_of(RUN) == {
        "name": "min_p", "num_experts": 4, "experts_per_token": 1.5, "p_start": 0.5, "p_rate": 0.5,
    }, rule_of(RUN)  # the rate is scaled to a short run  # fmt: skip
    shown = [record["layers"]["1"]["p"] for record in metrics(RUN, "train")]
    assert all(0 < p <= 1 for p in shown), shown
    assert len(shown) == len(set(shown)) == 3, "p does not move"
    assert metrics(RUN, "validation")[-1]["loss"] > 0
    assert (RUN / "report.html").is_file()


def resume() -> None:
    whole, lines = state_of(RUN), metrics(RUN, "train")
    checkpoint = RUN / "checkpoints" / "step_000006"
    checkpoint.rename(FOLDER / "aside")
    et(f"train --resume {RUN}")
    assert metrics(RUN, "train")[-1]["loss"] == lines[-1]["loss"]
    again = state_of(RUN)
    assert all(torch.equal(again[name], value) for name, value in whole.items()), "resumed is not as if never stopped"


def begin_from() -> None:
    """Rescales the rule's constants and keeps what was learned."""
    told = et(f"train --init-from {RUN} --steps 2 {LOOP} --data {CORPUS} --rule.p-start 0.9 --out {FOLDER / 'next'}")
    assert "the state of its rule is loaded" in told, told
    assert rule_of(FOLDER / "next")["experts_per_token"] == 1.5
    first, last = (metrics(run, "train")[i]["layers"]["1"]["p"] for run, i in ((FOLDER / "next", 0), (RUN, -1)))
    assert abs(first - last) < abs(first - 0.9), "p began anew"
    assert json.loads(et(f"plan --config {RUN / 'config.json'} --json"))["rule"] == "min_p"
    given = {"init_from": str(RUN), "train.steps": 100}
    assert rule_options_of(given)["p_rate"] == 0.3, "the rate is not scaled to the new run"


def compare() -> None:
    out = FOLDER / "compare"
    table = et(f"compare {WHAT} --rules min_p,expert_threshold --seeds 1 --steps 4 --eval-every 4 --out {out}")
    assert re.search(r"^ min_p ", table, re.MULTILINE), table
    record = json.loads((out / "compare.json").read_text())
    assert "min_p" in json.dumps(record)


def sweep() -> None:
    if find_spec("optuna") is None:
        return
    out, space = FOLDER / "sweep", "--space rule.p_rate=0.1|0.5"
    told = et(f"sweep {WHAT} --methods min_p --steps 2 --eval-every 2 --trials 1 {space} --out {out}")
    assert re.search(r"^ *min_p +1 .* rule\.p_rate ", told, re.MULTILINE), told
    assert json.loads((out / "sweep.json").read_text())["studies"]["min_p"]["best"]["options"] == {"rule.p_rate": "0.5"}
    assert json.loads((out / "min_p" / "best.json").read_text())["rule"]["name"] == "min_p"


def evaluate() -> None:
    told = et(f"evaluate {RUN} --eval-tokens 256 --dtype float32 --json")
    record = json.loads(re.findall(r"^\[.*\]$", told, re.MULTILINE)[0])[0]
    assert record["validation"]["loss"] == metrics(RUN, "validation")[-1]["loss"]
    refused(f"evaluate {RUN} --rate 1", "has no cutoffs")
    refused(f"evaluate {RUN} --rates 1,2", "has no cutoffs")


def calibrate() -> None:
    refused(f"calibrate {RUN} --to {FOLDER / 'calibrated'}", "min_p, which has no cutoffs")


def generate() -> None:
    plain = et(f"generate {RUN} --prompt the --max-tokens 6 --temperature 0")
    assert et(f"generate {RUN} --prompt the --max-tokens 6 --temperature 0") == plain
    shown = et(f"generate {RUN} --prompt the --max-tokens 6 --temperature 0 --show-routing")
    assert plain.strip() in shown, (plain, shown)
    refused(f"generate {RUN} --prompt the --rate 1", "min-p does not have")


def serve() -> None:
    """Without a socket; tests/serve tests the server as a process."""
    from starlette.testclient import TestClient

    from expert_threshold.serve import connections

    with mock.patch.object(connections, "run_server") as run_server:
        et(f"serve {RUN} --port 0 --threads 1")
    with TestClient(run_server.call_args.args[0], base_url="http://127.0.0.1") as client:
        (run,) = client.get("/explorer/runs").json()["runs"]
        assert (run["rule"], run["experts"], run["experts_per_token"], run["dial"]) == ("min_p", 4, 1.5, None)
        fields = {"model": "run", "prompt": "the", "max_tokens": 6, "temperature": 0}
        served = client.post("/v1/completions", json=fields).json()["choices"][0]["text"]
        alone = et(f"generate {RUN} --prompt the --max-tokens 6 --temperature 0").removesuffix("\n")
        assert alone == "the" + served, (alone, served)
        read = client.post("/explorer/read", json={"run": "run", "text": "the cat", "max_tokens": 2}).text
        events = [json.loads(line.removeprefix("data: ")) for line in read.splitlines() if line]
        assert events[-1] == {"done": True}, events[-1]
        layer = events[1]["tokens"][0]["layers"][0]
        assert len(layer["scores"]) == 4, layer
        assert 0 < sum(layer["gates"]) <= 1.00001, layer


def export_and_import() -> None:
    folder, again = FOLDER / "hf", FOLDER / "again"
    et(f"export {RUN} --to {folder}")
    card = (folder / "README.md").read_text()
    assert "min-p" in card or "min_p" in card, card
    et(f"import {folder} --out {again}")
    before, after = state_of(RUN), state_of(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def transformers() -> None:
    """The folder alone, where neither this package nor the rule's can be imported."""
    model, _ = load_model(RUN)
    with torch.no_grad():
        logits = model(IDS).logits
    assert logits is not None
    (FOLDER / "expected.json").write_text(json.dumps({"ids": IDS.tolist(), "logits": logits.tolist()}))
    program = """
        import importlib.abc, json, sys, torch
        class Refuse(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("expert_threshold", "min_p_rule"):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Refuse())
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
        expected = json.load(open(sys.argv[2]))
        with torch.no_grad():
            logits = model(torch.tensor(expected["ids"])).logits
        torch.testing.assert_close(logits, torch.tensor(expected["logits"]), rtol=1e-5, atol=1e-5)
        cached = model.generate(torch.tensor(expected["ids"])[:, :6], max_new_tokens=4, do_sample=False)
        whole = model.generate(
            torch.tensor(expected["ids"])[:, :6], max_new_tokens=4, do_sample=False, use_cache=False
        )
        assert torch.equal(cached, whole)
    """
    environment = os.environ | {"PYTHONPATH": "", "HF_HOME": str(FOLDER / "cache"), "HF_HUB_OFFLINE": "1"}
    arguments = [str(FOLDER / "hf"), str(FOLDER / "expected.json")]
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        env=environment, cwd=FOLDER, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def analyze() -> None:
    out, figures = FOLDER / "analysis", "loss_by_method,load_balance,fanout_by_loss"
    et(f"analyze {RUN} --tokens 200 --out {out} --figures {figures}")
    text = re.sub(r"<svg.*?</svg>|<style.*?</style>|<[^>]*>", " ", (out / "report.html").read_text(), flags=re.DOTALL)
    assert "min-p" in text
    assert "dense" not in text, re.findall(r".{80}dense.{80}", text)


STEPS: list[Callable[[], None]] = [
    plan, help_and_nonsense, train, resume, begin_from, compare, sweep, evaluate, calibrate, generate, serve,
    export_and_import, transformers, analyze,
]  # fmt: skip

if __name__ == "__main__":
    assert "min_p" in RULES, list(RULES)
    write_text(CORPUS)
    for each in STEPS:
        if each.__name__ in sys.argv[2:]:
            with contextlib.nullcontext() if each is analyze else mock.patch.object(page, "_figure", return_value=""):
                each()
            print(each.__name__, flush=True)

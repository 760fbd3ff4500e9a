"""Whatever comes to `et serve`, and whoever shares the batch: the same bits, no 5xx, and no growth of memory."""

from __future__ import annotations

import functools
import http.client
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("uvicorn", reason="the server's packages are not installed: pip install -e '.[serve]'")

import campaign
from campaign import trials
from cases import RULES, small_model, small_tokenizer, write_run
from expert_threshold.generate import decoder
from expert_threshold.generate.engine import Engine, Request, Step
from expert_threshold.model import GPT
from served import Process, Served, ask, connect, process, served

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")

DAY = 24 * 60 * 60 // 5  # requests of a day with one in five seconds
CLIENTS = 16
QUEUE = 6
GROWTH = 24  # MB that memory may differ by between a warm server and one at the end of a campaign
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Process]:
    # In bfloat16 logits are often equal but for rounding, which without --strict depends on who shares the batch.
    limits = ["--dtype", "float32", "--slots", "4", "--max-queue", str(QUEUE), "--max-body-seconds", "2"]
    with process(write_run(tmp_path / "small", small_model()).path, *limits) as server:
        for i in range(60):  # until memory is what work needs: all slots and long texts, and some refusals
            good = {"model": "small", "prompt": "the cat", "max_tokens": 40, "n": 4, "logprobs": 5, "echo": True}
            ask(server, "/v1/completions", good if i % 3 == 0 else good | {"n": "x" * 1000})
        yield server


def quiet(server: Process) -> dict[str, float]:
    """The metrics once nothing is being written."""
    while (metrics := server.metrics())["et_texts_running"]:
        time.sleep(0.1)
    return metrics


def report(title: str, server: Process, before: float) -> None:
    """For the eye, under `pytest -s`; and the memory that may not have grown."""
    after = server.megabytes()
    print(f"\n{title}: {dict(sorted(server.statuses().items()))}; {before:.1f} MB before, {after:.1f} MB after")
    assert after - before < GROWTH


VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3, 0.5, 1e308, 10**30, "", "small", "x" * 3000, "\ud800", "\0", [], [[]], [""], ["a"] * 99,
    {}, [None], [0, 269], [10**9], {"include_usage": True},
)  # fmt: skip


@linux
@trials(10_000)
def test_mutated_requests_meet_no_5xx_and_no_growth(trials: int, server: Process) -> None:
    """Fields of any value, bytes that flip, ends that are lost, other methods, paths and types of content."""
    good = {
        "model": "small",
        "prompt": "the cat",
        "max_tokens": 2,
        "n": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
    }
    good |= {"seed": 1, "stop": ["a"], "logprobs": 2, "echo": True, "stream": False, "rate": 1, "user": "u"}
    paths = ["/v1/models/x", "/health", "/", "/explorer/read", "/metrics", "/v1/completions/../models", "/%00"]

    def trial(chance: random.Random) -> None:
        body = good | {chance.choice([*good, "odd"]): chance.choice(VALUES) for _ in range(chance.randrange(4))}
        data = bytearray(json.dumps(body).encode())
        for _ in range(chance.choice([0, 0, 0, 1, 9])):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        if chance.random() < 0.1:
            del data[chance.randrange(len(data)) :]
        path = "/v1/completions" if chance.random() < 0.8 else chance.choice(paths)
        method = "POST" if chance.random() < 0.9 else chance.choice(["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "ODD"])
        kind = "application/json" if chance.random() < 0.9 else chance.choice(["text/plain", "", "application/json;x"])
        assert ask(server, path, bytes(data), method, Content_Type=kind).status < 500

    before = server.megabytes()
    campaign.campaign("mutated requests", trials, trial)
    report("mutated requests", server, before)


@linux
@trials(2_000)
def test_requests_of_schemathesis_meet_no_5xx_and_no_growth(trials: int, server: Process, tmp_path: Path) -> None:
    """Sends valid and invalid requests to every operation of the server's OpenAPI document."""
    pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install -e '.[soak]'")
    before, count = server.megabytes(), sum(server.statuses().values())
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    options = ["--checks", f"{checks},negative_data_rejection", "--mode", "all", "--phases", "coverage,fuzzing"]
    seed = 0
    while (made := sum(server.statuses().values()) - count) < trials:
        seed += 1
        more = ["--max-examples", str(min(400, max(20, trials // 25))), "--seed", str(seed)]
        done = subprocess.run([*command, *options, *more], capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stdout
    assert not [status for status in server.statuses() if status >= 500]
    quiet(server)
    report("schemathesis", server, before)
    campaign.done["fuzzed requests"] = made, 0


@linux
@trials(DAY)
def test_a_day_of_clients_of_every_kind_is_served_from_a_bounded_queue(trials: int, server: Process) -> None:
    """Some stream, some leave early, some ask for much; some send headers and bodies too slowly, or do not read. One
    asks the same again and again and gets the same."""
    left, answers, waiting, same = iter(range(trials)), Counter[int](), [], set()
    before = 0.0

    def client(number: int) -> None:
        chance = random.Random(number)
        for _ in left:
            body: dict[str, Any] = {"model": "small", "prompt": "the cat", "max_tokens": 12, "temperature": 0}
            if number:
                body |= {
                    "prompt": "the hat " * chance.randint(0, 10),
                    "max_tokens": chance.randint(0, 20),
                    "n": chance.choice([1, 1, 1, 2, 4]),
                    "temperature": 1,
                    "stream": chance.random() < 0.5,
                    "logprobs": chance.choice([None, 5]),
                }
            connection = connect(server)
            try:
                if number and chance.random() < 0.05:
                    linger(connection, chance)
                    continue
                connection.request("POST", "/v1/completions", json.dumps(body), JSON)
                if number and chance.random() < 0.2:  # leaves without an answer
                    continue
                response = connection.getresponse()
                answers[response.status] += 1
                content = response.read(chance.choice([1, 100])) if chance.random() < 0.1 else response.read()
                if number == 0 and response.status == 200 and response.isclosed():
                    same.add(json.loads(content)["choices"][0]["text"])
                if response.status == 429:
                    time.sleep(chance.random() / 5)
            finally:
                connection.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        before = before or (server.megabytes() if sum(answers.values()) > trials / 4 else 0)
        waiting.append(server.metrics()["et_texts_waiting"])
        assert ask(server, "/health").status == 200
        time.sleep(0.1)
    assert set(answers) <= {200, 429}
    assert max(waiting) <= QUEUE
    assert len(same) == 1
    assert quiet(server)["et_texts_waiting"] == 0
    report(f"{CLIENTS} clients, {dict(answers)}", server, before)
    campaign.done["requests of a day"] = trials, 0


def linger(connection: http.client.HTTPConnection, chance: random.Random) -> None:
    """Send some of a request, byte by byte, or a whole one whose answer is not read; hold on for a while, and leave."""
    body = json.dumps({"model": "small", "prompt": "the cat", "max_tokens": 50, "n": 4, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    request = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
    connection.connect()
    kept = chance.choice([chance.randrange(len(request)), len(request)])
    connection.sock.sendall(request[: max(kept - 5, 0)])
    for byte in request[max(kept - 5, 0) : kept]:
        connection.sock.sendall(bytes([byte]))
        time.sleep(0.05)
    time.sleep(chance.uniform(0, 0.5))


# Who shares the batch.


@functools.cache
def model_of(rule: str, dtype: torch.dtype) -> GPT:
    return small_model(RULES[rule], dtype=dtype)


def write(engine: Engine, victim: Request, company: list[Request], chance: random.Random) -> list[Step]:
    """Return the steps of the victim, which joins at any time; some of the company leave before they are done."""
    others, at = [], chance.randint(0, len(company))
    for place, request in enumerate([*company[:at], victim, *company[at:]]):
        writing = engine.add(request)
        if place == at:
            mine = writing
        else:
            others.append(writing)
        for _ in range(chance.randrange(3)):
            engine.step()
    while not mine.finished:
        engine.step()
        if others and chance.random() < 0.1:
            engine.cancel(others.pop())
    return mine.steps


@trials(500, few=20)
def test_a_text_has_the_same_bits_whoever_shares_its_batch(trials: int) -> None:
    """All logits, of the prompt too, and the scores and gates of every layer."""

    def request(chance: random.Random) -> Request:
        prompt = tuple(chance.choices(range(269), k=chance.randint(1, 20)))
        options = {
            "temperature": chance.choice([0, 0.9]),
            "seed": chance.randrange(99),
            "top_p": chance.choice([0.9, 1]),
        }
        return Request(prompt, chance.randint(1, 25), **options)

    def trial(chance: random.Random) -> None:
        model = model_of(chance.choice([*RULES]), chance.choice([torch.float32, torch.bfloat16]))
        victim = request(chance)._replace(tops=270, echo=True, record=True)
        company, tokenizer = [request(chance) for _ in range(chance.randint(1, 9))], small_tokenizer()
        with mock.patch.object(decoder, "library", chance.choice([decoder.library, lambda: None])):
            alone = write(Engine(model, tokenizer, slots=1, strict=True), victim, [], chance)
            together = Engine(model, tokenizer, slots=chance.randint(2, 8), strict=True)
            assert write(together, victim, company, chance) == alone

    campaign.campaign("batch invariance", trials, trial)


@trials(200, few=2)
def test_a_response_has_the_same_bytes_among_hostile_requests(trials: int) -> None:
    """Other clients ask for all that the limits allow, for other rates and extreme sampling, and leave."""
    extremes: dict[str, list[Any]] = {
        "prompt": ["", "the cat " * 6, ["the hat"] * 8, [269] * 40],
        "max_tokens": [0, 20],
        "temperature": [0, 1e-300, 1e300],
        "top_p": [1e-300, 1],
        "rate": [0, 1.5, 4],
        "n": [1, 4],
        "stop": [None, ["a", "e", "t"]],
        "logprobs": [None, 20],
        "echo": [False, True],
        "stream": [False, True],
    }

    def text(server: Served, seed: int) -> Any:
        body = {"model": "small", "prompt": "the cat", "max_tokens": 20, "seed": seed, "logprobs": 20, "echo": True}
        return json.loads(ask(server, "/v1/completions", body).text)["choices"]

    def hostile(server: Served, seed: float) -> None:
        chance = random.Random(seed)
        body = {"model": "small"} | {name: chance.choice(values) for name, values in extremes.items()}
        connection = connect(server)
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        if chance.random() < 0.7:
            assert connection.getresponse().status in (200, 400, 429)
        connection.close()

    with served(engine={"strict": True}) as server, ThreadPoolExecutor(8) as pool:

        def trial(chance: random.Random) -> None:
            seed = chance.randrange(1000)
            alone = text(server, seed)
            others = [pool.submit(hostile, server, chance.random()) for _ in range(chance.randint(2, 8))]
            assert text(server, seed) == alone
            for other in others:
                other.result()

        campaign.campaign("hostile co-batches", trials, trial)

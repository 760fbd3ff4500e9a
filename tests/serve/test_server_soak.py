"""Campaigns of minutes against `et serve` in a process of its own: whatever comes, no 5xx and no growth of memory.

ET_SOAK, 1 unless set, scales how long they are.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the server's packages are not installed: pip install -e '.[serve]'")

from cases import small_model, write_run
from served import ask, connect

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc"),
]

SHARE = float(os.environ.get("ET_SOAK", "1"))
FUZZED = round(5_000 * SHARE)  # requests of schemathesis
SECONDS = 240 * SHARE
CLIENTS = 16
QUEUE = 6
GROWTH = 24  # MB that memory may differ by between a warm server and one at the end of a campaign
JSON = {"Content-Type": "application/json"}


class Process:
    """`et serve` of a small run."""

    def __init__(self, run: Path) -> None:
        command = [sys.executable, "-m", "expert_threshold", "serve", str(run), "--port", "0", "--threads", "1"]
        # In bfloat16 logits are often equal but for rounding, which without --strict depends on who shares the batch.
        limits = ["--dtype", "float32", "--slots", "4", "--max-queue", str(QUEUE), "--max-body-seconds", "2"]
        self.log = run.parent / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen([*command, *limits], stderr=log)
        found = None
        while found is None and self.process.poll() is None:
            time.sleep(0.1)
            found = re.search(r"http://(127\.0\.0\.1:\d+)", self.log.read_text())
        assert found is not None, self.log.read_text()
        self.url = found[0]

    def metrics(self) -> dict[str, float]:
        lines = re.findall(r"^(et_\S+) (\S+)$", ask(self, "/metrics").text, re.M)
        return {name: float(number) for name, number in lines}

    def statuses(self) -> Counter[int]:
        counts: Counter[int] = Counter()
        for name, number in self.metrics().items():
            if status := re.search(r'status="(\d+)"', name):
                counts[int(status[1])] += round(number)
        return counts

    def megabytes(self) -> float:
        """Resident; without what a page of text or a map of a file takes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"RssAnon:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) / 1024

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) == 0
        assert "Traceback" not in self.log.read_text()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Process]:
    server = Process(write_run(tmp_path / "small", small_model()).path)
    try:
        warm_up(server)
        yield server
        server.stop()
    finally:
        server.process.kill()
        server.process.wait()


def warm_up(server: Process) -> None:
    """Until memory is what work needs: all slots and long texts, and some hundred refusals."""
    for i in range(60):
        good = {"model": "small", "prompt": "the cat", "max_tokens": 40, "n": 4, "logprobs": 5, "echo": True}
        ask(server, "/v1/completions", good if i % 3 == 0 else good | {"n": "x" * 1000})


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


def test_requests_of_schemathesis_meet_no_5xx_and_no_growth(server: Process, tmp_path: Path) -> None:
    """Sends valid and invalid requests to every operation of the server's OpenAPI document."""
    pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install -e '.[soak]'")
    before, count = server.megabytes(), sum(server.statuses().values())
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    options = ["--checks", f"{checks},negative_data_rejection", "--mode", "all", "--phases", "coverage,fuzzing"]
    seed = 0
    while sum(server.statuses().values()) - count < FUZZED:
        seed += 1
        more = ["--max-examples", str(max(20, round(400 * SHARE))), "--seed", str(seed)]
        done = subprocess.run([*command, *options, *more], capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stdout
    assert not [status for status in server.statuses() if status >= 500]
    quiet(server)
    report("schemathesis", server, before)


def test_16_mixed_clients_are_served_for_minutes_from_a_bounded_queue(server: Process) -> None:
    """Some stream, some leave early, some ask for much; one asks the same again and again and gets the same."""
    end = time.monotonic() + SECONDS
    answers, waiting, same = Counter[int](), [], set()

    def client(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < end:
            body: dict[str, Any] = {"model": "small", "prompt": "the cat", "max_tokens": 30, "temperature": 0}
            if number:
                body |= {
                    "prompt": "the hat " * chance.randint(0, 10),
                    "max_tokens": chance.randint(0, 30),
                    "n": chance.choice([1, 1, 1, 2, 4]),
                    "temperature": 1,
                    "stream": chance.random() < 0.5,
                    "logprobs": chance.choice([None, 5]),
                }
            connection = connect(server)
            try:
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
    time.sleep(SECONDS / 4)
    before = server.megabytes()
    while time.monotonic() < end:
        waiting.append(server.metrics()["et_texts_waiting"])
        time.sleep(0.1)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert set(answers) == {200, 429}
    assert max(waiting) == QUEUE
    assert len(same) == 1
    metrics = quiet(server)
    assert metrics["et_texts_waiting"] == 0
    print(
        f"\n{CLIENTS} clients: {metrics['et_completion_tokens_total']:.0f} tokens, {dict(answers)} in {SECONDS:.0f} s"
    )
    report(f"{CLIENTS} clients", server, before)

"""The server as seen by clients: OpenAI's own, and clients that are impatient, too many, wrong or gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("starlette", reason="the server's packages are not installed: pip install -e '.[serve]'")
pytest.importorskip("uvicorn", reason="the server's packages are not installed: pip install -e '.[serve]'")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install openai")

from cases import RULES, small_model, small_tokenizer  # noqa: E402
from expert_threshold.data import Tokenizer  # noqa: E402
from expert_threshold.generate import generate  # noqa: E402
from expert_threshold.generate.engine import Engine, Request  # noqa: E402
from expert_threshold.model import GPT  # noqa: E402
from expert_threshold.serve.connections import bind, url  # noqa: E402
from expert_threshold.serve.explorer import Explored  # noqa: E402
from expert_threshold.serve.worker import Limits, Worker  # noqa: E402
from served import PATIENCE, Reply, Served, ask, connect, hung, served, until  # noqa: E402

PROMPT = "the cat sat"


@pytest.fixture(scope="module")
def server(model: GPT) -> Iterator[Served]:
    with served(model, engine={"strict": True}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    with client_of(server) as client:
        yield client


def client_of(server: Served, key: str = "none") -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)


def complete(server: Served, **fields: Any) -> Reply:
    return ask(server, "/v1/completions", {"model": "small", "prompt": PROMPT} | fields)


def written(model: GPT, tokenizer: Tokenizer, prompt: Any, count: int, **options: Any) -> str:
    options = {"temperature": 0, "top_k": None} | options
    return "".join(step.text for step in generate(model, tokenizer, prompt, max_tokens=count, **options))


# What OpenAI's client gets.


def test_the_model_is_listed_under_its_name(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").owned_by == "expert-threshold"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")


def test_a_text_is_continued_as_by_the_engine(client: Any, model: GPT, tokenizer: Tokenizer) -> None:
    answer = client.completions.create(model="small", prompt=PROMPT, max_tokens=12, temperature=0)
    (choice,) = answer.choices
    assert choice.text == written(model, tokenizer, PROMPT, 12)
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    read = len(tokenizer.encode(PROMPT)) + 1
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (read, 12)
    assert answer.usage.total_tokens == read + 12
    assert answer.object == "text_completion"


def test_a_seed_writes_the_same_and_each_of_n_texts_is_another(client: Any, model: GPT, tokenizer: Tokenizer) -> None:
    options = {"model": "small", "prompt": PROMPT, "max_tokens": 10, "n": 3, "seed": 5}
    texts = [[c.text for c in client.completions.create(**options).choices] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
    assert texts[0][0] == written(model, tokenizer, PROMPT, 10, temperature=1, seed=5)
    greedy = client.completions.create(**options, temperature=0)
    assert len({choice.text for choice in greedy.choices}) == 1
    few = client.completions.create(**options, top_p=0.5, extra_body={"top_k": 1})
    assert few.choices[1].text == greedy.choices[1].text


def test_a_request_may_dial_its_experts_per_token(client: Any, model: GPT, tokenizer: Tokenizer) -> None:
    options = {"model": "small", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    rates = (None, 0, 2.5, 4)
    texts = [client.completions.create(**options, extra_body={"rate": rate}).choices[0].text for rate in rates]
    assert len(set(texts)) > 1
    assert texts == [written(model, tokenizer, PROMPT, 12, rate=rate) for rate in rates]
    with pytest.raises(openai.BadRequestError) as beyond:
        client.completions.create(**options, extra_body={"rate": 4.5})
    assert beyond.value.param == "rate"


def test_a_model_without_cutoffs_has_no_dial() -> None:
    with served(small_model(RULES["token_choice"])) as server:
        assert complete(server, rate=None).status == 200
        answer = complete(server, rate=1)
        assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "rate", "unsupported")


def test_a_stream_has_the_same_texts_in_pieces(client: Any, server: Served) -> None:
    options = {
        "model": "small", "prompt": ["the cat", "a"], "n": 2, "max_tokens": 12, "seed": 1, "echo": True, "logprobs": 1,
        "stop": ["t "],
    }  # fmt: skip
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for expected in whole.choices:
        pieces = [c for chunk in chunks for c in chunk.choices if c.index == expected.index]
        assert len(pieces) > 2
        assert "".join(piece.text for piece in pieces) == expected.text
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == expected.finish_reason
        assert all(piece.logprobs.tokens for piece in pieces)  # OpenAI's clients fail on an event without tokens
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [item for piece in pieces for item in getattr(piece.logprobs, name)]
            assert joined == getattr(expected.logprobs, name)
    plain = complete(server, stream=True)
    assert plain.headers["X-Accel-Buffering"] == "no"  # else nginx would delay them by default
    assert plain.text.endswith("\n\ndata: [DONE]\n\n")


# Limits.


def test_the_size_of_a_body_is_limited(server: Served) -> None:
    body = json.dumps({"model": "small", "user": "u"}).encode()
    padded = body[:-1] + b" " * (64 * 1024 - len(body)) + b"}"
    assert ask(server, "/v1/completions", padded).status == 200
    answer = ask(server, "/v1/completions", padded + b" ")
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


def test_a_body_without_a_length_is_counted_while_it_arrives(server: Served) -> None:
    with contextlib.closing(connect(server)) as connection:
        headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        connection.request("POST", "/v1/completions", iter([b" " * 30_000] * 3), headers, encode_chunked=True)
        assert connection.getresponse().status == 413


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with served(limits=Limits(body_seconds=0.05)) as server, begin(server, BODY) as begun:
        assert begun.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_an_invalid_request_gets_the_matching_status(server: Served) -> None:
    unknown = ask(server, "/v1/models/someone%2Fsmall")  # a name may have a slash
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
    path = "/v1/completions"
    for answer, status in (
        (ask(server, path, b"{}", **{"Content-Type": "text/plain"}), 415),
        (ask(server, path, b"{"), 400),
        (ask(server, path, {"model": "small", "prompt": "", "n": 9}), 400),
        (ask(server, path, {"model": "\ud800", "prompt": ""}), 404),
        (wrong := ask(server, path), 405),
        (ask(server, "/v1/models", {}), 405),
        (ask(server, "/v1/models/%ff"), 404),
        (ask(server, "/v1/models/..%2f..%2fetc%2fpasswd"), 404),
        (chat := ask(server, "/v1/chat/completions", {}), 404),
        (other := ask(server, "/nowhere"), 404),
    ):
        assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")
    assert "POST to /v1/completions, with a prompt" in chat.error["message"]
    assert other.error["code"] == "unknown_path"
    assert "at /v1/completions and /v1/models; see" in other.error["message"]
    assert (wrong.headers["Allow"], wrong.error["code"]) == ("POST", "method_not_allowed")


def test_a_full_queue_answers_429_and_queued_requests_are_served() -> None:
    with served(limits=Limits(queue=2), held=True, engine={"slots": 1}) as server, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(complete, server, n=n, temperature=0) for n in (1, 2)]
        until(lambda: server.worker.unfinished == 3)
        assert "et_texts_running 1\n" in ask(server, "/metrics").text
        assert server.worker.waiting == 2
        for options in ({}, {"stream": True}):
            refused = complete(server, **options)
            assert (refused.status, refused.error["code"]) == (429, "queue_full")
            assert refused.headers["Retry-After"] == "1"
        never = complete(server, n=4)  # never fits, not even into an empty queue
        assert (never.status, never.error["code"]) == (400, "too_many_texts")
        server.engine.open.set()
        assert [answer.result(PATIENCE).status for answer in waiting] == [200, 200]
        assert complete(server).status == 200
        assert 'et_requests_total{path="/v1/completions",status="429"} 2' in ask(server, "/metrics").text


def test_a_request_that_takes_too_long_ends_with_503_and_frees_its_row() -> None:
    with served(limits=Limits(seconds=0.05), held=True, engine={"slots": 1}) as server:
        late = complete(server, n=3)
        assert (late.status, late.error["type"], late.error["code"]) == (503, "server_error", "timeout")
        assert late.headers["Retry-After"] == "1"
        answer = complete(server, stream=True)
        assert answer.status == 200  # it was too late for another status
        (event, rest) = answer.text.split("\n\n")
        assert rest == ""
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == "timeout"
        until(lambda: server.worker.unfinished == 0)
        assert not server.worker._jobs  # otherwise every request would be kept forever
        assert not server.engine.busy


# Clients that do not finish.


UNFINISHED = [b"", b"POST /v1/completions HTTP/1.1\r\nHost: small\r\n", b"GET /health HT"]
WHOLE = b"GET /health HTTP/1.1\r\nHost: small\r\n\r\n"
BODY = b"POST /v1/completions HTTP/1.1\r\nHost: small\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"


def begin(server: Served, data: bytes) -> socket.socket:
    """Return a connection on which these bytes were sent."""
    begun = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE)
    begun.sendall(data)
    return begun


def rest(begun: socket.socket) -> bytes:
    """Return everything until the server closes the connection."""
    text = b""
    with begun, contextlib.suppress(ConnectionResetError):
        while data := begun.recv(65536):
            text += data
    return text


def test_a_request_that_does_not_come_is_not_waited_for() -> None:
    """Regression: headers were waited for indefinitely, and a thousand such connections locked everyone out."""
    with served(limits=Limits(header_seconds=1)) as server:
        first = [begin(server, data) for data in UNFINISHED]
        second = [begin(server, WHOLE + data) for data in UNFINISHED]
        refused = begin(server, BODY.replace(b"completions", b"nowhere"))
        with begin(server, UNFINISHED[1]) as begun, contextlib.suppress(ConnectionError):
            while True:  # sending a byte does not extend the deadline
                begun.sendall(b"X")
                time.sleep(0.01)
        assert [rest(begun) for begun in first] == [b""] * 3
        assert [rest(begun).count(b"HTTP/1.1 200 OK") for begun in second] == [1] * 3
        assert rest(refused).startswith(b"HTTP/1.1 404 ")  # although its body never arrived


@pytest.mark.parametrize("data", [*UNFINISHED, WHOLE, BODY], ids=["none", "headers", "line", "idle", "body"])
def test_unfinished_connections_per_address_are_limited_and_new_ones_answered(data: bytes) -> None:
    with served(limits=Limits(header_seconds=9e3, body_seconds=9e3, unfinished=4)) as server:
        hanging = []
        for count in range(1, 21):
            hanging.append(begin(server, data))
            until(lambda count=count: hung(server) == min(count, 4))  # the oldest is closed
            assert ask(server, "/health").status == 200
        assert all(rest(begun).count(b"HTTP") == (data == WHOLE) for begun in hanging[:16])
        for begun in hanging[16:]:
            begun.close()


def test_complete_requests_count_as_finished_while_they_wait() -> None:
    limits = Limits(unfinished=1, header_seconds=1)
    with served(limits=limits, held=True) as server, ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(complete, server) for _ in range(8)]
        until(lambda: server.worker.unfinished == 8)
        assert rest(begin(server, b"")) == b""  # past its deadline
        server.engine.open.set()
        assert [answer.result(PATIENCE).status for answer in waiting] == [200] * 8


# Clients that leave.


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_frees_its_row_and_its_place_in_the_queue(stream: bool) -> None:
    body = json.dumps({"model": "small", "prompt": PROMPT, "max_tokens": 40, "stream": stream})
    with served(held=True, engine={"slots": 1}) as server:
        engine, worker = server.engine, server.worker
        engine.free = 3
        writing, waiting = connect(server), connect(server)
        for connection, texts in ((writing, engine.running), (waiting, engine.waiting)):
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            until(lambda texts=texts: len(texts) == 1)
        for connection, left in ((waiting, 1), (writing, 0)):
            response = connection.getresponse() if stream else connection
            connection.close()
            response.close()
            until(lambda left=left: worker.unfinished == left)
            assert (len(engine.running), len(engine.waiting)) == (left, 0)
        assert not engine.busy
        engine.open.set()
        assert complete(server).status == 200
        assert 'status="500"' not in ask(server, "/metrics").text


# Access control.


def test_a_key_is_asked_for_on_every_route_but_health() -> None:
    with served(api_key="secret") as server:
        assert ask(server, "/health").status == 200
        for path, body in (
            ("/v1/models", None), ("/v1/models/small", None), ("/metrics", None), ("/openapi.json", None),
            ("/nowhere", None), ("/v1/completions", {"model": "small"}), ("/health/", None), ("//health", None),
        ):  # fmt: skip
            for given in ("", "Bearer sécret", "Bearer", "secret", "Basic secret", "Basic OnNlY3JldHM="):  # :secrets
                answer = ask(server, path, body, Authorization=given)
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        for host in ("x/health?", "x/health#", "["):  # a URL built from Host and path would have another path
            assert ask(server, "/v1/models", Host=host).status == 401, host
        for given in ("Bearer secret", "bearer  secret", "Basic OnNlY3JldA=="):  # :secret
            assert ask(server, "/v1/models", Authorization=given).status == 200
    with served(api_key="key") as server, client_of(server, "key") as client:
        assert client.completions.create(model="small", prompt="").choices
        with client_of(server, "other") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()


def test_a_local_server_is_not_reached_by_another_name() -> None:
    with served(hosts=("127.0.0.1", "::1", "localhost")) as server:
        assert ask(server, "/health").status == 200
        for host in ("127.0.0.1", "[::1]:80", "[::1]", "localhost", "LocalHost:80"):
            assert ask(server, "/health", Host=host).status == 200, host
        for host in ("evil.example:80", "evil.example", "", "[::1", "[::2]", "localhost.evil.example:80", ":80"):
            answer = ask(server, "/v1/models", Host=host)
            assert (answer.status, answer.error["code"]) == (403, "unknown_host"), host


@pytest.mark.parametrize("origins", [(), ("https://a.example",), ("*",)])
def test_pages_of_named_origins_may_call_the_api(origins: tuple[str, ...]) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with served(api_key="k", origins=origins) as server:
        for origin in ("https://a.example", "https://b.example"):
            allowed = origin if origin in origins else "*" if "*" in origins else None
            may = ask(server, "/v1/completions", method="OPTIONS", Origin=origin, **asks)
            body = {"model": "small", "prompt": PROMPT, "max_tokens": 1}
            answer = ask(server, "/v1/completions", body, Origin=origin, Authorization="Bearer k")
            assert (may.status == 200) == (allowed is not None)
            assert may.headers["Access-Control-Allow-Origin"] == allowed
            assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (200, allowed)


# What operators see.


def test_metrics_count_requests_tokens_and_pairs(model: GPT, tokenizer: Tokenizer) -> None:
    submit, delay = Worker.submit, 0.05

    def slow(worker: Worker, requests: Any) -> Any:  # the engine may have finished before the job is first read
        job = submit(worker, requests)
        time.sleep(delay)
        return job

    with served(model) as server:
        with mock.patch.object(Worker, "submit", slow):
            for _ in range(2):
                complete(server, max_tokens=6, temperature=0)
        complete(server, n=0)
        ask(server, "/favicon.ico")
        ask(server, "/v1/models/large")
        answer = ask(server, "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    lines = re.findall(r"^(et_\S+) (\S+)$", answer.text, re.M)
    numbers = {name: float(number) for name, number in lines}
    read = len(tokenizer.encode(PROMPT)) + 1
    assert numbers['et_requests_total{path="/v1/completions",status="200"}'] == 2
    assert numbers['et_requests_total{path="/v1/completions",status="400"}'] == 1
    assert numbers['et_requests_total{path="other",status="404"}'] == 1
    assert numbers['et_requests_total{path="/v1/models/{model}",status="404"}'] == 1
    assert numbers["et_prompt_tokens_total"] == 2 * read
    assert numbers["et_completion_tokens_total"] == 12
    for name in ("et_time_to_first_token_seconds", "et_completion_seconds"):
        assert numbers[f'{name}_bucket{{le="+Inf"}}'] == numbers[f"{name}_count"] == 2
        assert f"# TYPE {name} histogram\n" in answer.text
    assert 2 * delay <= numbers["et_time_to_first_token_seconds_sum"] <= numbers["et_completion_seconds_sum"]
    assert numbers["et_texts_running"] == numbers["et_texts_waiting"] == 0
    ids = [tokenizer.bos, *tokenizer.encode(PROMPT)]
    steps = list(generate(model, tokenizer, ids, max_tokens=6, temperature=0))
    with torch.no_grad():  # the last generated token needs no forward
        routings = model(torch.tensor([[*ids, *(step.token for step in steps[:-1])]]), record=True).routings
    taken = sum(int(routing.assignment.sum()) for routing in routings)
    assert numbers["et_assignments_total"] == 2 * taken
    assert numbers["et_routed_tokens_total"] == 2 * len(routings) * (read + 5)
    assert numbers["et_experts_per_token"] == pytest.approx(taken / len(routings) / (read + 5))


def test_a_failed_engine_is_reported_without_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with served(held=True) as server, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(complete, server, stream=stream) for stream in (False, True)]
        until(lambda: server.worker.unfinished == 2)
        with mock.patch.object(server.engine.decoder, "read", side_effect=RuntimeError("secret")):
            server.engine.open.set()
            whole, stream = (answer.result(PATIENCE) for answer in waiting)
        assert (whole.status, whole.error["code"]) == (503, "engine_failed")
        assert "engine_failed" in stream.text
        assert "secret" not in whole.text + stream.text
        assert complete(server).status == 503
        assert ask(server, "/health").status == 503
    assert "RuntimeError: secret" in caplog.text


def test_a_failed_handler_is_reported_without_its_traceback(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server.service, "parser", mock.Mock(side_effect=RuntimeError("secret")))
    answer = complete(server)
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
    assert "RuntimeError: secret" in caplog.text
    assert 'et_requests_total{path="/v1/completions",status="500"}' in ask(server, "/metrics").text


def test_an_engine_whose_loop_was_closed_ends_quietly(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(Engine(small_model(), small_tokenizer()), 1)

    async def begin() -> None:
        worker.start()
        worker.submit([Request((1, 2), 30)])

    asyncio.run(begin())  # the loop is closed before the engine's first step, as by a second Ctrl-C
    worker._thread.join(timeout=60)
    assert not caplog.text


def test_a_failed_engine_of_another_run_is_seen_by_health() -> None:
    other = Worker(Engine(small_model(), small_tokenizer()), 1)
    with served(explore=[Explored("other", other)]) as server:
        assert ask(server, "/health").status == 200
        other.failed = True
        assert ask(server, "/health").status == 503


def test_a_text_whose_logits_are_not_finite_fails_alone(model: GPT) -> None:
    with served(held=True) as server:
        decoder = server.engine.decoder
        read, step = decoder.read, decoder.step

        def broken(decoded: Any) -> Any:
            return decoded._replace(peaks=[peak._replace(logsumexp=math.nan) for peak in decoded.peaks])

        def damaged(row: int, piece: Any, every: bool) -> Any:
            decoded = read(row, piece, every=every)
            return decoded if row else broken(decoded)

        with mock.patch.object(decoder, "read", side_effect=damaged), ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(complete, server, max_tokens=3, temperature=t) for t in (0, 1)]
            until(lambda: server.worker.unfinished == 2)
            server.engine.open.set()
            answers = [answer.result(PATIENCE) for answer in waiting]
            stream = complete(server, stream=True, logprobs=1, echo=True)
        with mock.patch.object(decoder, "step", side_effect=lambda tokens: broken(step(tokens))):
            late = complete(server, stream=True)
        assert sorted(answer.status for answer in answers) == [200, 500]
        failed = next(answer for answer in answers if answer.status == 500)
        assert failed.error["code"] == "not_finite"
        assert '"code": "not_finite"' in stream.text
        assert "finish_reason" not in stream.text
        assert '"code": "not_finite"' in late.text
        assert "length" not in late.text
        assert server.worker.unfinished == 0
        assert complete(server, max_tokens=3).status == 200
        assert ask(server, "/health").status == 200


def test_a_stream_that_fails_ends_with_an_event(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    async def failing() -> AsyncGenerator[dict[str, Any]]:
        yield {"a": 1}
        raise RuntimeError("secret")

    with mock.patch("expert_threshold.serve.server._chunks", side_effect=lambda *_: failing()):
        answer = complete(server, stream=True)
    assert answer.status == 200
    assert json.loads(answer.text.split("data: ")[-1])["error"]["code"] == "internal_error"
    assert "RuntimeError: secret" in caplog.text
    assert "secret" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_outlasts_the_grace_is_told_so(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(1) as pool:
        with served(held=True) as server:
            server.engine.free = 3
            waiting = pool.submit(complete, server, max_tokens=9, stream=stream, temperature=0)
            until(lambda: server.worker.unfinished == 1 and not server.engine.free)
        answer = waiting.result(PATIENCE)
    error = json.loads(answer.text.split("data: ")[-1])["error"]  # the last event of a stream
    assert (answer.status, error["code"]) == (200 if stream else 503, "stopping")
    assert answer.text.endswith("\n\n") == stream
    assert "Traceback" not in caplog.text


def test_the_openapi_document_matches_the_parser(server: Served) -> None:
    document = json.loads(ask(server, "/openapi.json").text)
    assert document["openapi"] == "3.1.0"
    schemas = document["components"]["schemas"]
    assert schemas["StreamOptions"]["additionalProperties"] is False
    fields = schemas["CompletionRequest"]["properties"]
    assert fields["model"]["enum"] == ["small"]
    for name, (field, *_) in {name: field["anyOf"] for name, field in fields.items() if "anyOf" in field}.items():
        for edge, outwards in (("minimum", -1), ("maximum", 1)):
            if edge in field and name != "top_k":
                asked = {"prompt": "", "max_tokens": 0, name: field[edge]}
                full = name == "max_tokens" and edge == "maximum"  # the prompt leaves less room
                assert complete(server, **asked).status == (400 if full else 200)
                assert complete(server, **{name: field[edge] + outwards}).error["param"] == name
    assert ask(server, "/v1/completions", {"model": "small", "new": 1}).error["code"] == "unknown_field"


def test_a_server_has_the_port_at_all_addresses_of_its_host() -> None:
    sockets = bind("localhost", 0)
    assert len({each.getsockname()[1] for each in sockets}) == 1
    for each in sockets:
        host, port = each.getsockname()[:2]
        assert url(each) == f"http://{f'[{host}]' if ':' in host else host}:{port}"
        each.close()

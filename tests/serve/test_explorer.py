"""The endpoints of the routing explorer: they return what the model records, and only to their own page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="the server's packages are not installed: pip install -e '.[serve]'")
pytest.importorskip("uvicorn", reason="the server's packages are not installed: pip install -e '.[serve]'")

from cases import NULL_SCORES, RULES, small_model, small_tokenizer
from expert_threshold.generate.engine import Engine
from expert_threshold.model import GPT
from expert_threshold.serve.explorer import HEADERS, STATIC, Explored, describe, label, parse, require_own_page, routes
from expert_threshold.serve.server import create_app
from expert_threshold.serve.worker import ApiError, Limits, Worker
from served import PATIENCE, Served, ask, served

TEXT = "the cat sat on the mat"
TOKENIZER = small_tokenizer()
PLAIN = small_model(None)


def explored(model: GPT, name: str = "small") -> Explored:
    return Explored(name, Worker(Engine(model, TOKENIZER), 4))


def read(server: Served, **content: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the run's description and the tokens from /explorer/read."""
    reply = ask(server, "/explorer/read", {"run": "small", "text": TEXT} | content)
    assert reply.status == 200, reply
    events = [json.loads(event.removeprefix("data: ")) for event in reply.text.split("\n\n") if event]
    assert events[-1] == {"done": True}
    return events[0]["run"], [token for event in events[1:-1] for token in event["tokens"]]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(explore=[]) as server:
        yield server


# What the endpoints return.


@pytest.mark.parametrize("gate_norm", [None, "fanout"])
@pytest.mark.parametrize("rule", [*RULES.values(), NULL_SCORES], ids=[*RULES, "null_scores"])
def test_a_text_is_reported_as_the_model_records_it(rule: Any, gate_norm: Any) -> None:
    model = small_model(rule, gate_norm=gate_norm)
    with served(model, explore=[]) as server:
        facts, told = read(server)
    ids = torch.tensor([[TOKENIZER.bos, *TOKENIZER.encode(TEXT)]])
    output = model(ids, record=True)
    assert [token["token"] for token in told] == ids[0].tolist()
    assert "".join(token["text"] for token in told) == TEXT
    assert not any(token["written"] for token in told)

    logprobs = output.logits[0].log_softmax(-1)
    losses = -logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
    assert told[0]["loss"] is None
    assert told[0]["top"] == []
    torch.testing.assert_close(torch.tensor([token["loss"] for token in told[1:]]), losses, rtol=1e-4, atol=1e-5)
    for token, before in zip(told[1:], logprobs, strict=False):
        likeliest = torch.tensor([probability for _, _, probability in token["top"]])
        torch.testing.assert_close(likeliest, before.exp().topk(len(likeliest)).values, rtol=1e-4, atol=1e-5)

    assert [layer["dense"] for layer in facts["layers"]] == [True, rule is None, rule is None]
    for place, (layer, moe) in enumerate(model.moe_layers()):
        routing = output.routings[place]
        scores, gates = routing.scores[0, :, :4], routing.gates[0]
        if gate_norm == "fanout":
            gates = gates / routing.assignment[0].sum(-1, keepdim=True).clamp(min=1)
        for t, token in enumerate(told):
            found = token["layers"][place]
            torch.testing.assert_close(torch.tensor(found["scores"]), scores[t], rtol=1e-4, atol=1e-4)
            chosen = routing.assignment[0, t].nonzero()[:, 0]
            assert found["experts"] == chosen.tolist()
            torch.testing.assert_close(torch.tensor(found["gates"]), gates[t, chosen], rtol=1e-4, atol=1e-5)
            cutoffs, biases = facts["layers"][layer]["cutoffs"], facts["layers"][layer]["biases"]
            if cutoffs is not None:  # the page draws the line that decides
                assert found["experts"] == [i for i, s in enumerate(found["scores"]) if s > cutoffs[i]]
            else:
                biased = [s + b for s, b in zip(found["scores"], biases or [0] * len(scores[t]), strict=True)]
                assert found["experts"] == [i for i, s in enumerate(biased) if s >= found["border"] - 1e-5]
        bias = moe.router.rule.describe(moe.router.state).get("bias")
        assert (facts["layers"][layer]["biases"] is None) == (bias is None)


def test_generated_tokens_are_reported_as_if_read(server: Served) -> None:
    _, told = read(server, max_tokens=8, temperature=0, seed=1)
    assert [token["written"] for token in told].count(True) == 8
    assert told[-1]["finish"] == "length"
    _, again = read(server, text="".join(token["text"] for token in told))
    if [token["token"] for token in again] == [token["token"] for token in told]:  # else the text has other tokens
        for one, other in zip(told, again, strict=True):
            assert [layer["experts"] for layer in one["layers"]] == [layer["experts"] for layer in other["layers"]]
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-3)


def test_an_empty_text_is_its_beginning_alone(server: Served) -> None:
    _, told = read(server, text="")
    assert [(token["token"], token["text"], token["loss"]) for token in told] == [(TOKENIZER.bos, "", None)]


@pytest.mark.parametrize("rate", [0, 3, 4])  # at the lowest and the highest rate, cutoffs are infinite
def test_at_another_rate_the_reported_cutoffs_are_those_used(server: Served, rate: int) -> None:
    facts, told = read(server, rate=rate)
    assert facts["experts_per_token"] == rate
    as_trained, _ = read(server)
    assert facts["layers"][1]["cutoffs"] != as_trained["layers"][1]["cutoffs"]
    for token in told:
        for layer, found in zip(facts["layers"][1:], token["layers"], strict=True):
            assert found["experts"] == [i for i, s in enumerate(found["scores"]) if s > layer["cutoffs"][i]]


def test_a_run_has_a_dial_where_a_rate_can_be_asked_for() -> None:
    dials = {name: describe(explored(small_model(rule)))["dial"] for name, rule in RULES.items()}
    none = dict.fromkeys(RULES)
    assert dials == none | {"expert_choice": 4, "expert_threshold": 4}


def test_a_token_that_is_part_of_a_character_is_shown_by_its_bytes(server: Served) -> None:
    _, told = read(server, text="é")
    assert [token["label"] for token in told[1:]] == ["\\xc3", "\\xa9"]
    assert [token["text"] for token in told[1:]] == ["", "é"]
    assert label(TOKENIZER, TOKENIZER.bos) == "<|bos|>"


def test_each_run_reads_for_itself() -> None:
    first, second = small_model(), small_model(RULES["token_choice"], seed=1)
    with served(first, explore=[explored(second, "other")]) as server:
        found = json.loads(ask(server, "/explorer/runs").text)["runs"]
        assert [run["name"] for run in found] == ["small", "other"]
        _, told = read(server, run="other")
    output = second(torch.tensor([[TOKENIZER.bos, *TOKENIZER.encode(TEXT)]]), record=True)
    expected = output.routings[0].assignment[0].sum(-1).tolist()
    assert [len(token["layers"][0]["experts"]) for token in told] == expected


# What they refuse.


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (b"[]", 400, "JSON object"),
        ({"run": "large"}, 404, "no run with that name; use small"),
        ({"run": ["small"]}, 404, "no run"),
        ({"text": None}, 400, "text=None should be a valid string"),
        ({"text": "the " * 64}, 400, "tokens with BOS, but small accepts at most 64; shorten the text"),
        ({"max_tokens": -1}, 400, "max_tokens=-1 should be greater than or equal to 0"),
        ({"seed": -1}, 400, "seed"),
        ({"rate": 5}, 400, "rate"),
        ({"record": True}, 400, "unknown field"),
    ],
)
def test_nonsense_is_refused_in_one_line(server: Served, content: Any, status: int, says: str) -> None:
    content = content if isinstance(content, bytes) else {"run": "small", "text": TEXT} | content
    reply = ask(server, "/explorer/read", content)
    assert reply.status == status
    assert says in reply.error["message"]
    assert "\n" not in reply.error["message"]


VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.lists(st.integers())
RUNS = [explored(small_model()), explored(PLAIN, "plain")]
NAMES = ["run", "text", "max_tokens", "temperature", "top_k", "seed", "rate"]


@given(st.dictionaries(st.sampled_from([*NAMES, "stop"]), VALUES), st.sampled_from(["small", "plain"]))
@example({"text": "\ud800 half a character"}, "small")
@example({"temperature": 1e-300, "max_tokens": 1, "seed": 2**63 - 1}, "small")
def test_whatever_is_sent_is_read_or_refused(fields: dict[str, Any], name: str) -> None:
    body = json.dumps({"run": name, "text": TEXT} | fields).encode()
    error = None
    try:
        run, request = parse(body, RUNS, Limits())
        run.engine.check(request)
    except ApiError as refused:
        error = refused
    assert error is None or (400 <= error.status < 500 and "\n" not in error.message)


def test_limits_of_the_server_hold_here() -> None:
    with served(limits=Limits(prompt_tokens=4, output_tokens=2), explore=[]) as server:
        long = ask(server, "/explorer/read", {"run": "small", "text": TEXT})
        much = ask(server, "/explorer/read", {"run": "small", "text": "", "max_tokens": 3})
    assert (long.status, much.status) == (400, 400)
    assert "small accepts at most 4" in long.error["message"]


HERE, PROXY = "127.0.0.1:8000", ["lab.example"]
OWN = {"origin": "https://lab.example", "sec-fetch-site": "same-origin"}  # as sent through a proxy


@pytest.mark.parametrize(
    ("public", "headers"),
    [
        ([], {"host": HERE}),
        ([], {"host": "[::1]:8000"}),
        ([], {"host": "LOCALHOST:8000", "origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}),
        ([], {"host": "10.1.2.3"}),
        ([], {"host": "gpu:80", "sec-fetch-site": "none"}),
        (PROXY, OWN | {"host": "lab.example"}),
        (PROXY, OWN | {"host": HERE}),  # nginx's default
    ],
    ids=str,
)
def test_the_servers_own_page_is_let_in(public: list[str], headers: dict[str, str]) -> None:
    require_own_page(headers, ["localhost", "gpu"], public)


FOREIGN = [
    {},
    {"host": "evil.example:8000"},
    {"host": "evil.example:8000", "origin": "http://evil.example:8000", "sec-fetch-site": "same-origin"},  # rebound
    {"host": "127.0.0.1.evil.example"},
    {"host": "127.0.0.1@evil.example"},
    *({"host": HERE, "origin": origin} for origin in ("http://evil.example", "http://127.0.0.1:9000", "null")),
    *({"host": HERE, "sec-fetch-site": site} for site in ("cross-site", "same-site")),
    {"host": "[::1"},
]


@pytest.mark.parametrize(
    ("public", "headers"),
    [*((PROXY, headers) for headers in FOREIGN), ([], OWN | {"host": "lab.example"}), ([], OWN | {"host": HERE})],
    ids=str,
)
def test_no_other_page_is(public: list[str], headers: dict[str, str]) -> None:
    with pytest.raises(ApiError, match="--public-host NAME") as refused:
        require_own_page(headers, ["localhost", "gpu"], public)
    assert refused.value.status == 403


@pytest.mark.parametrize("path", ["/explorer/runs", "/explorer/read"])
def test_both_endpoints_ask_who_wants_to_know(server: Served, path: str) -> None:
    content = None if path.endswith("runs") else {"run": "small", "text": TEXT}
    assert ask(server, path, content).status == 200
    assert ask(server, path, content, Host="evil.example").status == 403
    assert ask(server, path, content, Origin="http://evil.example").status == 403
    assert ask(server, path, content, Sec_Fetch_Site="cross-site").status == 403


# The page.


def test_every_file_of_the_page_is_served_under_a_strict_policy(server: Served) -> None:
    for path in ["/", *(f"/static/{file.name}" for file in STATIC.iterdir())]:
        reply = ask(server, path)
        assert reply.status == 200, path
        assert reply.text
        for name, value in HEADERS.items():
            assert reply.headers[name] == value
    assert "'unsafe" not in HEADERS["Content-Security-Policy"]
    metrics = ask(server, "/metrics").text
    assert 'et_requests_total{path="/",status="200"}' in metrics
    assert 'et_requests_total{path="/static/{file}",status="200"}' in metrics


def test_a_run_s_report_is_linked_and_served_under_a_policy_of_its_own(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    others = [explored(PLAIN, "plain"), explored(PLAIN, "new")._replace(report=tmp_path / "none.html")]
    with served(api_key="secret", report=report, explore=others) as server:
        key = {"Authorization": "Bearer secret"}
        assert ask(server, "/explorer/report/0", **key).status == 404  # not yet
        report.write_text("<p>é</p>", encoding="utf-8")
        links = [run["report"] for run in json.loads(ask(server, "/explorer/runs", **key).text)["runs"]]
        assert links == ["explorer/report/0", None, None]
        reply = ask(server, f"/{links[0]}", **key)
        assert (reply.status, reply.text) == (200, "<p>é</p>")
        policy = reply.headers["Content-Security-Policy"]
        assert policy.startswith("sandbox allow-scripts; default-src 'none';")
        assert "allow-same-origin" not in policy
        for path in ("1", "2", "3", "-1", "x", "0/../1"):
            assert ask(server, f"/explorer/report/{path}", **key).status == 404, path
        assert ask(server, "/explorer/report/0").status == 401
        assert ask(server, "/explorer/report/0", **key, Sec_Fetch_Site="cross-site").status == 403
        assert ask(server, "/explorer/report/0", **key, Host="evil.example").status == 403


def test_no_other_file_is(server: Served) -> None:
    for path in ["", "../explorer.py", "%2e%2e%2fexplorer.py", "none.js", "%00"]:
        assert ask(server, f"/static/{path}").status == 404, path


def test_the_page_names_no_other_host_and_puts_no_text_into_html() -> None:
    for file in STATIC.iterdir():
        content = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http" not in content.replace("httpEquiv", ""), file
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in content, f"{file.name}: {way}"


def test_a_reader_that_does_not_read_frees_its_row_when_its_time_is_up() -> None:
    """Its connection accepts nothing more, so sending never completes."""
    body = json.dumps({"run": "small", "text": TEXT, "max_tokens": 20}).encode()
    scope = {
        "type": "http", "method": "POST", "path": "/explorer/read", "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }  # fmt: skip

    async def ask() -> int:
        run = explored(small_model())
        app = create_app([run.worker], "small", limits=Limits(seconds=0.05), routes=routes([run]))
        coming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return coming.pop() if coming else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        async with app.router.lifespan_context(app):
            await asyncio.wait_for(app(scope, receive, send), PATIENCE)
            await run.worker.stop()
        return len(run.engine.running)

    assert asyncio.run(ask()) == 0

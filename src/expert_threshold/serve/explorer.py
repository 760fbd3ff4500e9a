"""The routing explorer: a page that shows which experts each token of a text goes to, and its endpoints.

    GET  /                 the page, from `static/`
    GET  /explorer/runs    a description of each run, including the path of its report if there is one
    GET  /explorer/report/{place}
                           the file report.html of the run at this index in the list of runs
    POST /explorer/read    accepts {"run", "text", "max_tokens", …}, and sends the tokens of the text and of its
                           continuation as server-sent events: first {"run": …}, described at the request's rate,
                           then {"tokens": […]}, repeatedly, and finally {"done": true} or {"error": {"message": …}}

The responses reveal texts, so only this server's own pages may read them.
"""

from __future__ import annotations

import functools
import ipaddress
import math
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from ..data import Tokenizer
from ..generate.engine import Engine, Request, Step, TokenRouting
from ..glossary import as_html
from ..model import GPT
from ..moe import Router
from .completion import SEEDS, read_object, request_model, sampling_fields, validated
from .server import EventStream, answer, host_name, read_body, service, unknown_host
from .worker import ApiError, Job, Limits, Worker

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
OF_REPORT = HEADERS | {
    # A report has inline styles and scripts. The sandbox makes it a foreign page to this server, so its script cannot
    # read other texts here. Browsers refuse a sandbox combined with an opener policy.
    "Content-Security-Policy": "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "unsafe-none",
}
INFINITE = 1e38
TOPS = 6
"""How many of the likeliest tokens are reported at each position."""


class Explored(NamedTuple):
    """A run, with the name under which the page shows it. report: its report.html, which need not exist."""

    name: str
    worker: Worker
    report: Path | None = None

    @property
    def engine(self) -> Engine:
        return self.worker.engine


def describe(run: Explored, rate: float | None = None) -> dict[str, Any]:
    """Return a description of a run as JSON. `dial` is the largest supported rate, or None if the rate is fixed.

    Each layer has its cutoffs at this rate or the biases that are added to its scores, if it uses either.
    """
    config, moes = run.engine.model.config, dict(run.engine.model.moe_layers())
    rule, layers = config.rule, []
    for layer in range(config.layers):
        router = moes[layer].router if layer in moes else None
        cutoffs = None if router is None else router.thresholds(rate)
        layers.append({"dense": router is None, "cutoffs": _numbers(cutoffs), "biases": _numbers(_bias(router))})
    per_token = 0 if rule is None else rule.experts_per_token
    return {
        "name": run.name,
        "rule": config.to_dict()["rule"]["name"],
        "experts": 0 if rule is None else rule.num_experts,
        "experts_per_token": per_token if rate is None else rate,
        "shared_experts": 0 if rule is None else config.shared_experts,
        "context": config.context,
        "tokenizer": run.engine.tokenizer.hash,
        "dial": run.engine.dial,
        "layers": layers,
    }


def token_record(run: Explored, step: Step) -> dict[str, Any]:
    """Return a recorded step as JSON. The loss is in nats, and is None for the first token of the text.

    `top` lists the likeliest tokens at this position as [token, label, probability]. `layers` has an entry for each MoE
    layer. Its gates are in the order of its experts, and `border` is the lowest chosen score, including the bias.
    """
    assert step.routing is not None, "only recorded steps have a routing"
    model, tokenizer = run.engine.model, run.engine.tokenizer
    biases = [_bias(moe.router) for _, moe in model.moe_layers()]
    return {
        "token": step.token,
        "text": step.text,
        "label": label(tokenizer, step.token),
        "written": not step.echoed,
        "loss": None if step.logprob is None else _number(-step.logprob),
        "finish": step.finish,
        "top": [[token, label(tokenizer, token), _number(math.exp(logprob))] for token, logprob in step.top],
        "layers": [_layer(model, bias, to) for bias, to in zip(biases, step.routing, strict=True)],
    }


def _bias(router: Router | None) -> Tensor | None:
    """Return the biases that a rule adds to the scores to select the top k, or None if it has none."""
    best = None if router is None else router.rule.biased_top_k(router.state)
    return None if best is None or not best[0].any() else best[0]


def _layer(model: GPT, bias: Tensor | None, routing: TokenRouting) -> dict[str, Any]:
    """Return a token's routing in one layer as JSON. Only `border` includes the bias; the scores do not."""
    biases = [0.0] * len(routing.scores) if bias is None else bias.tolist()
    chosen = [routing.scores[expert] + biases[expert] for expert in routing.experts]
    share = max(len(routing.experts), 1) if model.config.gate_norm == "fanout" else 1
    return {
        "scores": [_number(score) for score in routing.scores],
        "experts": routing.experts,
        "gates": [_number(gate / share) for gate in routing.gates],
        "border": _number(min(chosen)) if chosen else None,
    }


def label(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as readable text, in which bytes of incomplete characters appear as escapes such as \\xe2."""
    return tokenizer.decode_bytes([token]).decode("utf-8", errors="backslashreplace")


def _numbers(values: Tensor | None) -> list[float] | None:
    return None if values is None else [_number(value) for value in values.tolist()]


def _number(value: float) -> float:
    """Round a number to six digits to save space, and clamp it, since JSON cannot represent an infinite cutoff."""
    return float(f"{min(max(value, -INFINITE), INFINITE):.6g}")


@functools.cache
def read_model(limits: Limits, context: int, dial: float | None) -> type[BaseModel]:
    """Return the pydantic model of the body of /explorer/read."""
    fields = sampling_fields(limits, context, dial)
    fields["max_tokens"] = (int, Field(0, ge=0, le=limits.output_tokens or context))
    fields["seed"] = (int | None, Field(None, ge=0, lt=SEEDS))
    return request_model("ReadRequest", {"run": (str, ...), "text": (str, ...)} | fields)


def parse(body: bytes, runs: Sequence[Explored], limits: Limits) -> tuple[Explored, Request]:
    """Parse the body of /explorer/read. Raises ApiError if it is invalid or exceeds the limits."""
    given = read_object(body)
    run = next((run for run in runs if run.name == given.get("run")), None)
    if run is None:
        raise ApiError(404, f"there is no run with that name; use {', '.join(run.name for run in runs)}", param="run")
    engine, tokenizer, context = run.engine, run.engine.tokenizer, run.engine.context
    fields = validated(read_model(limits, context, engine.dial), given)
    prompt = (tokenizer.bos, *tokenizer.encode(fields.text))
    most = min(limits.prompt_tokens or context, context - min(fields.max_tokens, 1))
    if len(prompt) > most:
        message = f"the text has {len(prompt)} tokens with BOS, but {run.name} accepts at most {most}; shorten the text"
        raise ApiError(400, message, param="text", code="context_length_exceeded")
    sampling = {"temperature": fields.temperature, "top_k": fields.top_k, "seed": fields.seed, "rate": fields.rate}
    return run, Request(prompt, fields.max_tokens, tops=TOPS, echo=True, record=True, **sampling)


def require_own_page(headers: Mapping[str, str], names: Collection[str], public: Collection[str] = ()) -> None:
    """Raise ApiError (403) if the request may come from a page of another site.

    Origin and Sec-Fetch-Site reveal such a page, unless the site's name resolves to this server (DNS rebinding). The
    browser then considers both the same origin, but the Host header contains the site's name, so only `names` and IP
    addresses, which cannot be rebound, are allowed there. public: host names of a proxy that may have changed Host.
    """
    host = headers.get("host", "").lower()
    name, origin = host_name(host), headers.get("origin")
    try:
        site = None if origin is None else urlsplit(origin.lower())
        foreign = site is not None and site.netloc != host and site.hostname not in public
    except ValueError:
        foreign = True
    if not (_is_address(name) or name in names or name in public):
        raise unknown_host([*names, *public])
    if foreign or headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        message = "the explorer only answers its own page; behind a proxy it needs et serve --public-host NAME"
        raise ApiError(403, message, code="foreign_origin")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def events(run: Explored, job: Job) -> AsyncGenerator[dict[str, Any]]:
    """Yield the events of a job that has a single text, as they arrive."""
    yield {"run": describe(run, job.requests[0].rate)}
    async for update in job:
        yield {"tokens": [token_record(run, step) for step in update.steps]}


def routes(
    runs: Sequence[Explored], names: Collection[str] = ("localhost",), public: Collection[str] = ()
) -> list[Route]:
    """Return the routes for `create_app`. The server's own run comes first. See `require_own_page` for the names."""
    files = {path.name: path for path in sorted(STATIC.iterdir()) if path.suffix in TYPES}
    facts = [describe(run) for run in runs]
    names, public = [name.lower() for name in names], [name.lower() for name in public]

    def reports() -> dict[int, Path]:
        """Return the existing reports, keyed by the index of their run."""
        return {place: run.report for place, run in enumerate(runs) if run.report and run.report.is_file()}

    async def page(request: HttpRequest) -> Response:
        text = files["index.html"].read_text(encoding="utf-8").replace("<!-- glossary -->", as_html())
        return Response(text, media_type=TYPES[".html"], headers=HEADERS)

    async def file(request: HttpRequest) -> Response:
        path = files.get(request.path_params["file"])
        if path is None:
            raise ApiError(404, "there is no such file", code="not_found")
        return Response(path.read_bytes(), media_type=TYPES[path.suffix], headers=HEADERS)

    async def list_runs(request: HttpRequest) -> Response:
        require_own_page(request.headers, names, public)
        links = {place: f"explorer/report/{place}" for place in reports()}
        response = answer({"runs": [each | {"report": links.get(place)} for place, each in enumerate(facts)]})
        response.headers.update(HEADERS)
        return response

    async def report(request: HttpRequest) -> Response:
        require_own_page(request.headers, names, public)
        path = reports().get(request.path_params["place"])
        if path is None:
            raise ApiError(404, "there is no such report", code="not_found")
        return Response(path.read_bytes(), media_type=TYPES[".html"], headers=OF_REPORT)

    async def read(request: HttpRequest) -> Response:
        require_own_page(request.headers, names, public)
        here = service(request)
        run, asked = parse(await read_body(request, here.limits), runs, here.limits)
        job = run.worker.submit([asked])
        return EventStream(job, events(run, job), here.limits, done='{"done": true}', headers=HEADERS)

    return [
        Route("/", page),
        Route("/static/{file}", file),
        Route("/explorer/runs", list_runs),
        Route("/explorer/report/{place:int}", report),
        Route("/explorer/read", read, methods=["POST"]),
    ]

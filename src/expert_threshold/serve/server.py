"""An HTTP server with OpenAI's completions API, built on starlette (extra `serve`)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import itertools
import json
import logging
import secrets
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..generate.engine import Step
from .completion import Answer, Parser, model_body, require_model, shown
from .openapi import schema
from .worker import RETRY, ApiError, Job, Limits, Update, Worker

T = TypeVar("T")
log = logging.getLogger("uvicorn.error")

FAILED = ApiError(500, "the server failed; see its log for the reason", code="internal_error")
GONE = ApiError(499, "the client has closed the connection")  # nginx's status, for /metrics
STOPPING = ApiError(503, "the server is stopping", code="stopping", headers=RETRY)


def create_app(
    workers: Sequence[Worker],
    name: str,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    hosts: Sequence[str] | None = None,
    origins: Sequence[str] = (),
    routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """Return an app that serves the model of the first worker as `name`, and starts and stops all workers.

    api_key: the key required on every route except /health. hosts: the names and addresses (without brackets) that the
    Host header may contain, so that pages of other sites cannot read a local server through a name that resolves to it;
    None allows any. origins: other sites whose pages may read responses; "*" allows all. routes: additional routes
    behind the same checks; their handlers use `service(request)`.
    """
    limits, engine = limits or Limits(), workers[0].engine
    most = workers[0].slots + limits.queue  # more would never fit
    limits = dataclasses.replace(limits, texts=min(limits.texts, most))
    here = Service(workers, Parser(engine.tokenizer, engine.context, name, limits, engine.dial))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        for each in here.workers:
            each.start()
        yield
        for each in here.workers:
            await each.stop()

    own = [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", model),
        Route("/v1/completions", completions, methods=["POST"]),
    ]
    on: Any = {HTTPException: _on_http_exception}
    app = Starlette(routes=[*own, *routes], exception_handlers=on, lifespan=lifespan)
    app.router.redirect_slashes = False  # else /health/ would redirect to a URL built from the Host header
    paths = {route.endpoint: route.path_format for route in app.routes if isinstance(route, Route)}
    app.add_middleware(_Gate, here=here, paths=paths, api_key=api_key, hosts=hosts)
    if origins:  # outside the gate, since a browser's preflight request carries no key
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    app.state.service = here
    return app


class Service:
    """The state that all handlers share. workers: the worker for completions, then those of other runs."""

    def __init__(self, workers: Sequence[Worker], parser: Parser) -> None:
        self.worker, self.workers, self.parser, self.limits = workers[0], workers, parser, parser.limits
        self.created = int(time.time())
        self.requests: Counter[tuple[str, int]] = Counter()  # answered, by path and status
        self.first_token, self.whole = Histogram(), Histogram()  # seconds of completions

    async def timed(self, job: Job) -> AsyncGenerator[Update]:
        """Yield a job's updates, and record its time to first token and, if it finishes, its total time."""
        waits = True
        async for update in job:
            if waits and not all(step.echoed for step in update.steps):
                self.first_token.add(time.monotonic() - job.submitted)
                waits = False
            yield update
        self.whole.add(time.monotonic() - job.submitted)


class Histogram:
    """A histogram of durations in seconds. BOUNDS are the upper bounds of its buckets."""

    BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(self.BOUNDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.BOUNDS, seconds)] += 1
        self.sum += seconds

    def samples(self) -> dict[str, float]:
        """Return the samples for Prometheus, keyed by the suffix of their name, including labels."""
        counts = zip((*self.BOUNDS, "+Inf"), itertools.accumulate(self.counts), strict=True)
        buckets = {f'_bucket{{le="{bound}"}}': float(count) for bound, count in counts}
        return buckets | {"_sum": self.sum, "_count": sum(self.counts)}


def service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


class _Gate:
    """Middleware that admits only requests with the key and an allowed Host, and counts requests by route. It responds
    with an error if a handler raises one, fails, or is cancelled because the server is stopping.
    """

    def __init__(
        self, app: ASGIApp, here: Service, paths: Mapping[Any, str], api_key: str | None, hosts: Sequence[str] | None
    ) -> None:
        self.app, self.requests, self.paths = app, here.requests, paths
        self.hosts = None if hosts is None else [host.lower() for host in hosts]
        self.key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        started = False

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                path = self.paths.get(scope.get("endpoint"), "other")
                self.requests[path, message["status"]] += 1
            await send(message)

        try:
            self._admit(Request(scope))
            await self.app(scope, receive, counted)
            return
        except ApiError as refusal:
            error = refusal
        except ClientDisconnect:
            error = GONE
        except asyncio.CancelledError:
            error = STOPPING
        except Exception:
            log.exception("a request failed")
            error = FAILED
        if not started:
            await _answer_error(error)(scope, receive, counted)

    def _admit(self, request: Request) -> None:
        if self.hosts is not None and host_name(request.headers.get("host", "")) not in self.hosts:
            raise unknown_host(self.hosts)
        if self.key is None or request.scope["path"] == "/health":  # request.url depends on the Host header
            return
        if secrets.compare_digest(_given_key(request), self.key):
            return
        # Send two headers, since Chromium does not prompt for a password if both challenges are in one.
        schemes = ("Bearer", 'Basic realm="API key as password"')
        challenges = [("WWW-Authenticate", scheme) for scheme in schemes]
        message = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
        raise ApiError(401, message, code="invalid_api_key", headers=challenges)


def _given_key(request: Request) -> bytes:
    """Return the key in a request. Programs send it as a bearer token, and browsers as a password typed by the user."""
    scheme, _, given = request.headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(given, validate=True).partition(b":")[2]
    return given.strip().encode() if scheme.lower() == "bearer" else b""


def host_name(header: str) -> str:
    """Return the name or address in a Host header, in lower case, without brackets or port; "" if there is none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def unknown_host(hosts: Sequence[str]) -> ApiError:
    message = f"this server is reached as {', '.join(hosts)}; other names require et serve --public-host NAME"
    return ApiError(403, message, code="unknown_host")


# Handlers.


async def health(request: Request) -> Response:
    failed = any(worker.failed for worker in service(request).workers)
    return answer({"status": "failed" if failed else "ok"}, 503 if failed else 200)


async def metrics(request: Request) -> Response:
    """Return metrics in Prometheus's text format."""
    here = service(request)
    worker, counts = here.worker, here.worker.engine.counts
    requests = {f'path="{path}",status="{status}"': n for (path, status), n in sorted(here.requests.items())}
    fanout = counts.assignments / counts.routed if counts.routed else 0.0
    lines = [
        _metric("requests_total", "Requests answered.", requests),
        _metric("prompt_tokens_total", "Prompt tokens read.", counts.read),
        _metric("completion_tokens_total", "Tokens generated.", counts.written),
        _metric("slots", "Texts that can be generated at once.", worker.slots),
        _metric("texts_running", "Texts being generated.", worker.unfinished - worker.waiting),
        _metric("texts_waiting", "Texts waiting for a slot.", worker.waiting),
        _metric("routed_tokens_total", "Tokens routed, counted once per MoE layer.", counts.routed),
        _metric("assignments_total", "Token-expert pairs of the routed tokens.", counts.assignments),
        _metric("experts_per_token", "Mean number of experts per token and layer so far.", fanout),
        _metric("time_to_first_token_seconds", "Seconds to the first token of a completion.", here.first_token),
        _metric("completion_seconds", "Seconds to finish a completion.", here.whole),
    ]
    return Response("".join(lines), media_type="text/plain; version=0.0.4")


def _metric(name: str, text: str, value: float | Mapping[str, float] | Histogram) -> str:
    """Format a metric, which is a counter if its name ends in _total. A mapping holds one number for each label set."""
    if isinstance(value, Histogram):
        kind, samples = "histogram", value.samples()
    else:
        kind = "counter" if name.endswith("_total") else "gauge"
        samples = {f"{{{k}}}": v for k, v in value.items()} if isinstance(value, Mapping) else {"": value}
    lines = [f"# HELP et_{name} {text}", f"# TYPE et_{name} {kind}"]
    return "\n".join([*lines, *(f"et_{name}{end} {number}" for end, number in samples.items())]) + "\n"


async def openapi(request: Request) -> Response:
    return answer(schema(service(request).parser.model))


async def models(request: Request) -> Response:
    here = service(request)
    return answer({"object": "list", "data": [model_body(here.parser.name, here.created)]})


async def model(request: Request) -> Response:
    here, name = service(request), request.path_params["model"]
    require_model(name, here.parser.name)
    return answer(model_body(name, here.created))


async def completions(request: Request) -> Response:
    here = service(request)
    asked = here.parser(await read_body(request, here.limits))
    texts = Answer(asked, here.parser.tokenizer)
    job = here.worker.submit(asked.requests)
    if asked.stream:
        return EventStream(job, _chunks(here, job, texts), here.limits)
    with job:
        return answer(await while_connected(request.receive, _whole(here, job, texts)))


async def _whole(service: Service, job: Job, texts: Answer) -> dict[str, Any]:
    """Wait until all texts are finished, and return the response."""
    steps: list[list[Step]] = [[] for _ in texts.choices]
    try:
        async with asyncio.timeout(service.limits.seconds):
            async for update in service.timed(job):
                steps[update.text] += update.steps
    except TimeoutError:
        raise _out_of_time(service.limits) from None
    pieces = [choice.piece(of_text, True) for choice, of_text in zip(texts.choices, steps, strict=True)]
    return texts.body(pieces) | {"usage": texts.usage()}


async def _chunks(service: Service, job: Job, texts: Answer) -> AsyncGenerator[dict[str, Any]]:
    """Yield the response in chunks."""
    usage = {"usage": None} if texts.asked.include_usage else {}
    async for update in service.timed(job):
        piece = texts.choices[update.text].piece(update.steps, update.finished)
        if piece["text"] or piece["finish_reason"] or (piece["logprobs"] or {}).get("tokens"):
            yield texts.body([piece]) | usage
    if usage:
        yield texts.body([]) | {"usage": texts.usage()}


class EventStream(Response):
    """A response that sends each event as a JSON object, then `done`. Errors after its start are sent as events.

    The job is cancelled when the client disconnects or the time is up, so a client that does not read cannot block it.
    """

    def __init__(
        self,
        job: Job,
        events: AsyncGenerator[dict[str, Any]],
        limits: Limits,
        *,
        done: str = "[DONE]",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        now = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # otherwise nginx would buffer events
        super().__init__(media_type="text/event-stream", headers=now | dict(headers or {}))
        del self.headers["content-length"]
        self._job, self._events, self._limits, self._done = job, events, limits, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._job, contextlib.suppress(ClientDisconnect):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                last = await while_connected(receive, self._send(send))
            except asyncio.CancelledError:
                last = json.dumps(STOPPING.body)
            await _send_last(send, last)

    async def _send(self, send: Send) -> str:
        """Send the events, and return the data of the last one, which is `done` or an error."""
        try:
            async with asyncio.timeout(self._limits.seconds), contextlib.aclosing(self._events):
                async for event in self._events:
                    await _send_event(send, json.dumps(event, allow_nan=False))
            return self._done
        except TimeoutError:
            error = _out_of_time(self._limits)
        except ApiError as refusal:
            error = refusal
        except Exception:
            log.exception("a stream failed")
            error = FAILED
        return json.dumps(error.body)


async def _send_last(send: Send, data: str) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1):  # a client that has not read so far will not start now
            await _send_event(send, data)
            await send({"type": "http.response.body"})


async def _send_event(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


def _out_of_time(limits: Limits) -> ApiError:
    message = f"the request was not finished within {limits.seconds:g} seconds"
    return ApiError(503, message, code="timeout", headers=RETRY)


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return the request's body. Raises ApiError if its content type is not JSON, or if it is too large or too slow."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "send the header Content-Type: application/json", code="unsupported_media_type")
    body = bytearray()
    too_large = ApiError(413, f"the body is larger than {limits.body_bytes} bytes", code="body_too_large")
    if int(request.headers.get("content-length", 0)) > limits.body_bytes:  # h11 has checked that it is a number
        raise too_large
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body_bytes:
                    raise too_large
    except TimeoutError:
        message = f"the body took longer than {limits.body_seconds:g} seconds to arrive"
        raise ApiError(408, message, code="timeout") from None
    return bytes(body)


async def while_connected(receive: Receive, result: Coroutine[Any, Any, T]) -> T:
    """Return the result, or cancel it if the client disconnects. Call this after the body has been read."""
    task, gone = asyncio.ensure_future(result), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# Responses.


def answer(content: Any, status: int = 200) -> Response:
    """Return a JSON response in ASCII, since texts may contain lone surrogates, which UTF-8 cannot encode."""
    return Response(json.dumps(content, allow_nan=False), status, media_type="application/json")


def _answer_error(error: ApiError) -> Response:
    response = answer(error.body, error.status)
    for name, value in error.headers:
        response.headers.append(name, value)
    return response


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, headers, code = shown(request.scope["path"]), error.headers or {}, None
    if error.status_code == 404:
        remedy = "the API is at /v1/completions and /v1/models; see /openapi.json"
        if "/chat/" in request.scope["path"]:
            remedy = "this model continues texts and was not trained on chats: POST to /v1/completions, with a prompt"
        message, code = f"{path} does not exist; {remedy}", "unknown_path"
    elif error.status_code == 405:
        message, code = f"{path} supports {headers['Allow']}, not {request.method}", "method_not_allowed"
    else:
        message = f"{request.method} here: {error.detail}"
    return _answer_error(ApiError(error.status_code, message, code=code, headers=headers.items()))

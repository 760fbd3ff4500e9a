"""The thread that runs the engine and delivers its results, and the limits and errors of requests."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..generate.engine import ActiveRequest, Engine, Request, Step
from ..option import Count, Positive, option, require_valid

log = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class Limits:
    """Limits on single requests and on the whole server. None means that only the context length applies."""

    body_bytes: Count = option(64 * 1024, "Maximum size of a request body in bytes.")
    prompt_tokens: Count | None = option(None, "Maximum number of tokens in a prompt. Defaults to the full context.")
    output_tokens: Count | None = option(None, "Maximum number of new tokens per text. Defaults to the full context.")
    n: Count = option(8, "Maximum number of texts per prompt (the field n).")
    texts: Count = option(32, "Maximum number of texts per request (prompts × n).")
    logprobs: Count = option(20, "Maximum number of top tokens to report per position (the field logprobs).")
    stop_characters: Count = option(4096, "Maximum total length of the stop strings of a request, in characters.")
    queue: Count = option(64, "Maximum number of texts waiting for a slot. Further requests fail with 429.")
    seconds: Positive = option(300.0, "Seconds after which a request fails with 503, including its wait for a slot.")
    body_seconds: Positive = option(10.0, "Seconds after which a request fails with 408 if its body has not arrived.")
    header_seconds: Positive = option(10.0, "Seconds after which a connection is closed if its headers are incomplete.")
    unfinished: Count = option(
        64, "Maximum number of connections per address that wait for a request; beyond it, the oldest is closed."
    )

    def __post_init__(self) -> None:
        """Raise ValueError if a limit is out of bounds."""
        require_valid(Limits, vars(self))


Headers = Iterable[tuple[str, str]]
RETRY: Headers = (("Retry-After", "1"),)
"""Tells a client to try again after a second."""


class ApiError(Exception):
    """An error for the client, with an HTTP status, a message, the invalid field, and a machine-readable code.

    headers: (name, value) pairs, since a header may occur twice.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Headers = ()
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def engine_failed() -> ApiError:
    return ApiError(503, "the engine has failed; the server's log says why", code="engine_failed")


class Update(NamedTuple):
    """The steps added to one text of a job since its last update."""

    text: int
    steps: tuple[Step, ...]
    finished: bool


class Job:
    """Texts in progress, in the order of their requests. Iterate over a job for updates. Leaving `with` cancels it."""

    def __init__(self, worker: Worker, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.updates: asyncio.Queue[Update | ApiError] = asyncio.Queue()
        self.unfinished = len(requests)
        self.submitted = time.monotonic()
        self._worker = worker

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.unfinished:
            self._worker.cancel(self)

    async def __aiter__(self) -> AsyncIterator[Update]:
        """Yield updates until all texts are finished. Raises ApiError if the engine or a text fails."""
        while self.unfinished or not self.updates.empty():
            update = await self.updates.get()
            if isinstance(update, ApiError):
                raise update
            yield update


class Worker:
    """Runs an engine for an event loop, in a separate thread that receives commands through a queue.

    queue_limit: the maximum number of waiting texts. threads: the number for matrix products; None is torch's default.
    """

    def __init__(self, engine: Engine, queue_limit: int, threads: int | None = None) -> None:
        self.engine = engine
        self.slots = engine.decoder.rows
        self.failed = False
        self._jobs: set[Job] = set()  # those with unfinished texts
        self._queue_limit, self._threads = queue_limit, threads
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._texts: dict[ActiveRequest, tuple[Job, int]] = {}  # each unfinished text's job and its index in the job
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread. Call this from the event loop that will run the jobs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Stop after the current step. Texts in progress are dropped."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def unfinished(self) -> int:
        """The number of texts that are waiting or running."""
        return sum(job.unfinished for job in list(self._jobs))  # a copy, so that any thread may ask

    @property
    def waiting(self) -> int:
        """The number of texts that wait for a row of the batch."""
        return max(0, self.unfinished - self.slots)

    def submit(self, requests: Sequence[Request]) -> Job:
        """Queue texts. Raises ValueError if one is invalid, and ApiError if the engine failed or the queue is full."""
        for request in requests:
            self.engine.check(request)
        if self.failed:
            raise engine_failed()
        if self.unfinished + len(requests) > self.slots + self._queue_limit:
            message = f"the queue is full, with {self.waiting} of {self._queue_limit} texts waiting; retry later"
            raise ApiError(429, message, code="queue_full", headers=RETRY)
        job = Job(self, requests)
        self._jobs.add(job)
        self._commands.put(lambda: self._add(job))
        return job

    def cancel(self, job: Job) -> None:
        """Cancel a job's unfinished texts after the current step."""
        self._commands.put(lambda: self._cancel(job))

    # These methods run in the worker's thread.

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            while self._run_commands():
                self._publish(self.engine.step())
        except Exception:
            if not self._loop.is_closed():  # as after a second Ctrl-C
                log.exception("the engine has failed")
                self._loop.call_soon_threadsafe(self._fail)

    def _run_commands(self) -> bool:
        """Run all queued commands, and wait for one if the engine is idle. Returns False on the command to stop."""
        while not self.engine.busy or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _add(self, job: Job) -> None:
        for index, request in enumerate(job.requests):
            self._texts[self.engine.add(request)] = job, index

    def _cancel(self, job: Job) -> None:
        left = [writing for writing, (of, _) in self._texts.items() if of is job]
        for writing in left:
            self.engine.cancel(writing)
        self._publish(left)

    def _publish(self, moved: Sequence[ActiveRequest]) -> None:
        news: list[tuple[Job, Update | ApiError]] = []
        for writing in moved:
            job, index = self._texts[writing]
            steps, failed = writing.take(), writing.error is not None
            if steps or not failed:
                news.append((job, Update(index, steps, writing.finished and not failed)))
            if writing.error is not None:
                news.append((job, ApiError(500, writing.error, code="not_finite")))
            if writing.finished:
                del self._texts[writing]
        self._loop.call_soon_threadsafe(self._deliver, news)

    # These methods run in the event loop.

    def _deliver(self, news: Sequence[tuple[Job, Update | ApiError]]) -> None:
        for job, update in news:
            job.updates.put_nowait(update)
            job.unfinished -= isinstance(update, ApiError) or update.finished
            if not job.unfinished:
                self._jobs.discard(job)

    def _fail(self) -> None:
        self.failed = True
        for job in self._jobs:
            job.updates.put_nowait(engine_failed())

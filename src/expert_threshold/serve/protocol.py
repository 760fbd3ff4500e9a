"""HTTP that withstands clients that open connections and never finish sending a request."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from .limits import Limits

SETTLE = 0.25
"""Seconds before an unfinished connection counts, since many may open at once and then send their requests."""


def bounded(limits: Limits) -> type[H11Protocol]:
    """Return the protocol class of a server with these limits, for uvicorn's option `http`."""
    return type("Bounded", (_Bounded,), {"limits": limits, "hanging": defaultdict(dict)})


class _Bounded(H11Protocol):
    """uvicorn's protocol, with a deadline for headers and a limit on the unfinished connections of an address.

    A connection is unfinished from when it opens, or from its last response, until a whole request has arrived. Headers
    have their deadline here, bodies in `read_body`, which can tell the client. Beyond the limit the oldest connection
    is closed, not the newest, so that a client that does send a request gets a response, from that address too.

    No server provides this. uvicorn's timeout for idle connections ends with the first byte. Hypercorn's and granian's
    cover the headers, but neither limits connections per address, nor lets code do so.
    """

    limits: Limits
    hanging: defaultdict[str | None, dict[_Bounded, None]]  # by address, oldest first

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._timers: list[asyncio.TimerHandle] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        self._expect_request()
        super().on_response_complete()  # starts on a request that arrived meanwhile
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_waiting()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self._end_waiting()
        self._timers = [
            self.loop.call_later(SETTLE, self._hang),
            # Abort rather than close: output that is still unsent by then was not being read, either.
            self.loop.call_later(self.limits.header_seconds, self.transport.abort),
        ]

    def _look(self) -> None:
        """Check whether the request is complete, and start or stop its deadline."""
        if self.cycle is None or self.cycle.response_complete:
            return
        if self.cycle.more_body:
            self._timers[-1].cancel()
        else:
            self._end_waiting()

    def _hang(self) -> None:
        crowd = self.hanging[self._address]
        crowd[self] = None
        if len(crowd) > self.limits.unfinished:
            oldest = next(iter(crowd))
            oldest._end_waiting()
            oldest.transport.abort()

    def _end_waiting(self) -> None:
        for timer in self._timers:
            timer.cancel()
        crowd = self.hanging[self._address]
        crowd.pop(self, None)
        if not crowd:
            del self.hanging[self._address]

    @property
    def _address(self) -> str | None:
        return self.client and self.client[0]

"""HTTP for clients that open connections and do not finish what they begin to send."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from .limits import Limits

SETTLE = 0.25
"""Seconds for which an unfinished connection is not counted, since many may open at once and send their requests."""


def bounded(limits: Limits) -> type[H11Protocol]:
    """The protocol of a server with these limits, for uvicorn's option `http`."""
    return type("Bounded", (_Bounded,), {"limits": limits, "hanging": defaultdict(dict)})


class _Bounded(H11Protocol):
    """uvicorn's protocol, with a deadline for headers and a limit on the unfinished connections of an address.

    A connection is unfinished from when it opens, or has its last answer, until a whole request has come. Headers have
    a deadline here, bodies in `read_body`, which can tell the client. Of too many connections the oldest is closed, not
    the newest, so that whoever does send a request is answered, from that address too.

    Nothing ready-made does this. uvicorn has a timeout for idle connections, which ends with the first byte.
    Hypercorn's and granian's reach to the end of the headers, but neither limits an address, nor lets code do so.
    """

    limits: Limits
    hanging: defaultdict[str | None, dict[_Bounded, None]]  # by address, the oldest first

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
        super().on_response_complete()  # begins with a request that has come meanwhile
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_waiting()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self._end_waiting()
        self._timers = [
            self.loop.call_later(SETTLE, self._hang),
            # Whatever was not sent by then was not read by then, either.
            self.loop.call_later(self.limits.header_seconds, self.transport.abort),
        ]

    def _look(self) -> None:
        """See how far the request has come."""
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

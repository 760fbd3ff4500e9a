"""Runs uvicorn with sockets and connections that withstand clients that never finish sending a request."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from starlette.applications import Starlette

CONNECTIONS = 1024
"""The maximum number of connections; beyond it uvicorn itself responds with 503."""

SETTLE = 0.25
"""Seconds before an unfinished connection counts toward the limit: a client may open many, and then send requests."""


def run_server(app: Starlette, sockets: Sequence[socket.socket]) -> None:
    """Serve until SIGINT or SIGTERM; a second signal aborts requests in progress."""
    with contextlib.suppress(KeyboardInterrupt):
        _Server(configure(app)).run(list(sockets))


class _Server(uvicorn.Server):
    """A server that prints its URL once it handles signals."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        if self.started:
            print(f"et serve: running on {url(sockets[0])} until Ctrl-C", file=sys.stderr)


def configure(app: Starlette, *, grace: int = 10) -> uvicorn.Config:
    """Return uvicorn's configuration. It uses h11, which is strict and limits the size of headers.

    grace: how many seconds requests in progress have to finish after the first signal.
    """
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=grace,
        access_log=False,
        server_header=False,
    )


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol, with a deadline for headers and a limit on unfinished connections per address.

    A connection is unfinished until a whole request has arrived, both when it is new and after each response. The
    deadline for headers is enforced here; the deadline for bodies is in `read_body`, which can still respond to the
    client. Beyond the limit, the oldest connection is closed, so a client that does send requests is still served.

    No server provides this. uvicorn's timeout for idle connections stops at the first byte. The timeouts of Hypercorn
    and granian cover the headers, but neither server limits connections per address or lets code do so.
    """

    def __init__(self, config: uvicorn.Config, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.hanging_since: float | None = None  # when the connection started to count as unfinished
        self._timers: list[asyncio.TimerHandle] = []
        self._limits = cast("Starlette", config.app).state.service.limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        self._expect_request()
        super().on_response_complete()  # starts a request that arrived in the meantime
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_waiting()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self._end_waiting()
        self._timers = [
            self.loop.call_later(SETTLE, self._hang),
            # Abort rather than close: a client with unsent output at this point is not reading it either.
            self.loop.call_later(self._limits.header_seconds, self.transport.abort),
        ]

    def _look(self) -> None:
        """Cancel the deadline when the headers have arrived, and stop waiting when the request is complete."""
        if self.cycle is None or self.cycle.response_complete:
            return
        if self.cycle.more_body:
            self._timers[-1].cancel()
        else:
            self._end_waiting()

    def _hang(self) -> None:
        self.hanging_since = self.loop.time()
        every = cast("set[BoundedProtocol]", self.server_state.connections)
        crowd = [(each.hanging_since, each) for each in every if each.hanging_since and each._address == self._address]
        if len(crowd) > self._limits.unfinished:
            _, oldest = min(crowd, key=lambda pair: pair[0])
            oldest._end_waiting()
            oldest.transport.abort()

    def _end_waiting(self) -> None:
        self.hanging_since = None
        for timer in self._timers:
            timer.cancel()

    @property
    def _address(self) -> str | None:
        return self.client and self.client[0]


def url(listener: socket.socket) -> str:
    """Return the URL of a server that listens on this socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bind(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for each address of the host. If `port` is 0, all of them use the same free port.

    Clients that connect before the server runs will wait for it. Raises ValueError if no server can listen there.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise ValueError(f"--host {host} is unknown; use a host name or an address of this machine") from None
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as opened:
        foreign = None
        for family, address in dict.fromkeys((family, address[0]) for family, *_, address in found):
            try:
                sockets.append(opened.enter_context(socket.create_server((address, port), family=family)))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # IPv6 is off on some machines
                    raise _refusal(host, port, error) from None
                foreign = error
            else:
                port = sockets[0].getsockname()[1]
        if not sockets:
            raise ValueError(
                f"--host {host} is not an address of this machine; omit it, or use 0.0.0.0 for all addresses"
            ) from foreign
        opened.pop_all()
    return sockets


def _refusal(host: str, port: int, error: OSError) -> ValueError:
    if error.errno == errno.EADDRINUSE:
        return ValueError(f"--port {port} is already in use on {host}; choose another port, or 0 for any free one")
    if error.errno == errno.EACCES:
        return ValueError(f"--port {port} is not allowed for this user; choose a port of at least 1024")
    return ValueError(f"--host {host} --port {port}: {error.strerror}; choose another address")

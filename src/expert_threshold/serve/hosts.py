"""Host names and addresses: parsing, binding and listening."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit


def host_name(header: str) -> str:
    """Return the name or address in a Host header, in lower case, without brackets and port; "" if there is none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def url(listener: socket.socket) -> str:
    """Return the URL of a server that listens on this socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bind(host: str, port: int) -> list[socket.socket]:
    """Return a bound socket for each address of the host, not yet listening; with port 0 all share one free port.

    Raises ValueError where no server can listen.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise ValueError(f"--host {host}: unknown name; give a name or an address of this machine") from None
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as opened:
        foreign = None
        for family, address in dict.fromkeys((family, address) for family, *_, address in found):
            try:
                sockets.append(opened.enter_context(_bound(family, (address[0], port, *address[2:]))))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # IPv6 is off on some machines
                    raise _refusal(host, port, error) from None
                foreign = error
            else:
                port = sockets[0].getsockname()[1]
        if not sockets:
            raise ValueError(
                f"--host {host}: not an address of this machine; leave it out, or give 0.0.0.0 for all"
            ) from foreign
        opened.pop_all()
    return sockets


def _bound(family: int, address: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # reuse a port just released; elsewhere this option steals ports in use
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # IPv4 has a socket of its own
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def listen(sockets: Sequence[socket.socket], backlog: int) -> None:
    """Listen on the sockets. Raises ValueError if another server bound to the same address listened first."""
    for each in sockets:
        try:
            each.listen(backlog)
        except OSError as error:
            host, port = each.getsockname()[:2]
            raise _refusal(host, port, error) from None


def _refusal(host: str, port: int, error: OSError) -> ValueError:
    if error.errno == errno.EADDRINUSE:
        return ValueError(f"--port {port}: in use at {host}; give another one, or 0 for one that is free")
    if error.errno == errno.EACCES:
        return ValueError(f"--port {port}: not allowed for this user; give one of 1024 or more")
    return ValueError(f"--host {host} --port {port}: {error.strerror}; give another address")

"""Downloads over HTTPS: concurrent, resumed, retried, verified, and moved into place only when complete."""

from __future__ import annotations

import hashlib
import http.client
import os
import queue
import random
import re
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

CHUNK = 1 << 20  # bytes
TIMEOUT = 30.0  # seconds without a byte
ATTEMPTS = 6  # in a row without progress
FIRST_WAIT, LAST_WAIT = 0.5, 30.0  # seconds between attempts, doubled after each
LONGEST_WAIT = 300.0  # seconds, the longest Retry-After that is honoured
PASSING = {408, 425, 429, 500, 502, 503, 504}
"""HTTP errors worth a retry."""

Progress = Callable[[int, int], None]
"""Receives the bytes present and the total, as far as it is known."""


class Remote(NamedTuple):
    url: str
    path: Path  # the destination

    @property
    def part(self) -> Path:
        """The partial download."""
        return self.path.with_name(f".part-{self.path.name}")


class _PassingError(Exception):
    """An error worth a retry, after `after` seconds if the server says so."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class _StoppedError(Exception):
    pass


def download(remotes: Sequence[Remote], *, connections: int = 8, progress: Progress | None = None) -> None:
    """Download every file that is missing.

    A partial download lies beside its destination as `.part-NAME`. The next attempt or call resumes it if the server
    states the file's SHA-256, by which the result is verified; Hugging Face does.
    Raises ValueError if the server is unreachable, refuses a file, or fails to deliver it in several attempts; files
    that are complete by then stay. Raises OSError if the disk is full.
    """
    job = _Job(remotes)
    # Daemon threads, since one that waits for the network must not keep the program from exiting.
    threads = [threading.Thread(target=job.work, daemon=True) for _ in range(min(connections, len(remotes)))]
    for thread in threads:
        thread.start()
    try:
        while job.error is None and any(thread.is_alive() for thread in threads):
            time.sleep(0.1)
            if progress is not None and job.sizes:
                progress(*job.known())
    finally:
        job.stop.set()
    if job.error is not None:
        raise job.error


class _Job:
    """The state shared by the threads of one call."""

    def __init__(self, remotes: Sequence[Remote]) -> None:
        self.left: queue.SimpleQueue[Remote] = queue.SimpleQueue()
        missing = [remote for remote in remotes if not remote.path.exists()]
        for remote in missing:
            self.left.put(remote)
        self.files = len(missing)
        self.sizes: dict[Path, int] = {}
        self.arrived: dict[Path, int] = {}
        self.stop = threading.Event()
        self.answered = False
        """True once any server has answered; before, the network is assumed down and retries are pointless."""
        self.error: Exception | None = None

    def known(self) -> tuple[int, int]:
        """Return the bytes present and the total; files of unknown size count as the mean of the others."""
        sizes = list(self.sizes.values())
        return sum(list(self.arrived.values())), round(sum(sizes) / len(sizes) * self.files)

    def work(self) -> None:
        """Download files until none is left, or until an error, which is kept for the caller."""
        try:
            while not self.stop.is_set():
                self.fetch(self.left.get_nowait())
        except (queue.Empty, _StoppedError):
            pass
        except Exception as error:
            self.error = self.error or error
            self.stop.set()

    def fetch(self, remote: Remote) -> None:
        """Download one file, retrying as long as attempts make progress."""
        failures = 0
        while True:
            before = self.arrived.get(remote.path, 0)
            try:
                return self.attempt(remote)
            except _PassingError as fault:
                failures = 1 if self.arrived.get(remote.path, 0) > before else failures + 1
                if failures >= ATTEMPTS:
                    raise ValueError(
                        f"{remote.url}: {fault}, {ATTEMPTS} times in a row; try again later, the partial file is kept"
                    ) from None
                wait = min(FIRST_WAIT * 2**failures, LAST_WAIT) * random.uniform(0.5, 1)
                if self.stop.wait(wait if fault.after is None else fault.after):
                    raise _StoppedError from None

    def attempt(self, remote: Remote) -> None:
        """Request the missing bytes, append them, and move the file into place if it is complete."""
        have = remote.part.stat().st_size if remote.part.exists() else 0
        redirects = _Redirects()
        with self.open(remote, have, redirects) as response:
            sha256 = _sha256(redirects.linked) or _sha256(response.headers.get("ETag"))
            if response.status == 206:
                rest = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
                # Without a hash, a mixture of two versions of the file would go unnoticed.
                if rest is None or int(rest[1]) != have or sha256 is None:
                    self.discard(remote, "the server sends something else than the rest of the file")
                size = int(rest[2])
            else:
                have, size = 0, int(response.headers.get("Content-Length", -1))
            self.arrived[remote.path] = have
            if size >= 0:
                self.sizes[remote.path] = size
            with remote.part.open("ab" if have else "wb") as file:
                while chunk := _read(response):
                    file.write(chunk)
                    self.arrived[remote.path] += len(chunk)
                    if self.stop.is_set():
                        raise _StoppedError
                file.flush()
                os.fsync(file.fileno())
        arrived = self.arrived[remote.path]
        if arrived < size:
            raise _PassingError(f"the connection ended after {arrived} of {size} bytes")
        if sha256 is not None:
            with remote.part.open("rb") as whole:
                found = hashlib.file_digest(whole, "sha256").hexdigest()
            if found != sha256:
                self.discard(remote, f"the download has sha256 {found[:12]}…, the server states {sha256[:12]}…")
        os.replace(remote.part, remote.path)

    def discard(self, remote: Remote, reason: str) -> NoReturn:
        """Remove the partial download, and raise the error that has it requested again."""
        remote.part.unlink()
        self.arrived[remote.path] = 0
        raise _PassingError(reason)

    def open(self, remote: Remote, have: int, redirects: _Redirects) -> http.client.HTTPResponse:
        """Return the answer to a request for the bytes from `have` on."""
        headers = {"User-Agent": "expert-threshold", "Accept-Encoding": "identity"}
        request = urllib.request.Request(remote.url, headers=headers | ({"Range": f"bytes={have}-"} if have else {}))
        try:
            response: http.client.HTTPResponse = urllib.request.build_opener(redirects).open(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            self.answered = True
            error.close()
            if error.code == 416:
                self.discard(remote, "the file has changed on the server")
            if error.code not in PASSING:
                raise ValueError(f"{remote.url}: HTTP {error.code} {error.reason}; check the address") from None
            after = error.headers.get("Retry-After", "")
            if after.isdigit() and int(after) > LONGEST_WAIT:
                raise ValueError(f"{remote.url}: asks to wait for {after} s; try again then") from None
            raise _PassingError(f"HTTP {error.code} {error.reason}", int(after) if after.isdigit() else None) from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError) or not self.answered:
                reason = getattr(error.reason, "strerror", None) or error.reason
                raise ValueError(
                    f"cannot reach {request.host} ({reason}): connect to the network and try again, or put the files "
                    f"into {remote.path.parent} by hand"
                ) from None
            raise _PassingError(str(error.reason)) from None
        except (OSError, http.client.HTTPException) as error:
            raise _PassingError(str(error) or type(error).__name__) from None
        self.answered = True
        return response


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but only to https, and keeps the file's ETag that they state, as Hugging Face does."""

    def __init__(self) -> None:
        self.linked: str | None = None

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if req.type == "https" and not newurl.startswith("https://"):
            raise ValueError(f"{req.full_url}: redirected to {newurl}, which is not https; check the address")
        self.linked = headers.get("X-Linked-ETag", self.linked)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _PassingError(str(error) or type(error).__name__) from None


def _sha256(etag: str | None) -> str | None:
    """Return the SHA-256 that an ETag is; None if it is something else."""
    text = (etag or "").strip('"').lower()
    return text if re.fullmatch(r"[0-9a-f]{64}", text) else None

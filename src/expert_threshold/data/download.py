"""Downloads over HTTPS: concurrent, resumed, retried, verified, and moved into place only when complete."""

from __future__ import annotations

import email.utils
import hashlib
import http.client
import json
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
from dataclasses import asdict, dataclass
from email.message import Message
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

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

    @property
    def note(self) -> Path:
        """The file that records the identity of the partial download."""
        return self.path.with_name(f".note-{self.path.name}")


@dataclass(frozen=True)
class Identity:
    """A file's identity as stated by a server; fields are None if not stated."""

    etag: str | None
    size: int | None
    sha256: str | None
    md5: str | None

    @property
    def can_resume(self) -> bool:
        """Return True if a later response can be verified to be of the same bytes."""
        return self.sha256 is not None or self.etag is not None

    def same(self, other: Identity) -> bool:
        """Return True if both identify the same bytes. Caches in front of a server may differ in their ETags."""
        known = "etag" if self.sha256 is None or other.sha256 is None else "sha256"
        return (self.size, getattr(self, known)) == (other.size, getattr(other, known))

    @classmethod
    def of(cls, headers: Message, size: int | None, linked: str | None) -> Identity:
        """Return the identity from response headers. linked: the file's ETag from a redirect, as of Hugging Face."""
        etag = headers.get("ETag")
        hashes = [_hex(tag) for tag in (linked, etag)]
        sha256 = next((tag for tag in hashes if len(tag) == 64), None)
        # Only S3 promises that 32 digits are the MD5 of the content, and only of what was uploaded in one part.
        md5 = hashes[1] if len(hashes[1]) == 32 and headers.get("Server") == "AmazonS3" else None
        return cls(etag if etag and not etag.startswith("W/") else None, size, sha256, md5)


def _hex(tag: str | None) -> str:
    text = (tag or "").strip('"').lower()
    return text if re.fullmatch(r"[0-9a-f]+", text) else ""


class _PassingError(Exception):
    """An error worth a retry, after `after` seconds if the server says so."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class _ForeignError(_PassingError):
    """The partial download belongs to an older version of the file and is discarded."""


class _StoppedError(Exception):
    pass


def download(remotes: Sequence[Remote], *, connections: int = 8, progress: Progress | None = None) -> None:
    """Download every file that is missing.

    Partial downloads lie beside their destination as `.part-NAME`, and the next call resumes them, so Ctrl-C loses
    nothing. Sizes are verified, and contents against the SHA-256 (or S3's MD5) that the server states.
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
                if isinstance(fault, _ForeignError):
                    self.arrived[remote.path] = before = 0
                    remote.part.unlink(missing_ok=True)
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
        part, note = remote.part, remote.note
        expected = _read_note(note)
        have = part.stat().st_size if expected is not None and expected.can_resume and part.exists() else 0
        if expected is None or not have or have != expected.size:
            response, linked = self.open(remote, have, expected)
            with response:
                expected, have = _continue(response, linked, have, expected)
                if have == 0:
                    note.write_text(json.dumps(asdict(expected)), encoding="utf-8")
                self.arrived[remote.path] = have
                if expected.size is not None:
                    self.sizes[remote.path] = expected.size
                with part.open("ab" if have else "wb") as file:
                    self.receive(remote, response, file)
        size = part.stat().st_size
        if expected.size is not None and size < expected.size:
            raise _PassingError(f"the connection ended after {size} of {expected.size} bytes")
        if fault := _fault(part, expected):
            raise _ForeignError(fault)
        os.replace(part, remote.path)
        note.unlink()

    def open(self, remote: Remote, have: int, expected: Identity | None) -> tuple[http.client.HTTPResponse, str | None]:
        """Return the response to a request for the bytes from `have` on, and the file's ETag from a redirect."""
        headers = {"User-Agent": "expert-threshold", "Accept-Encoding": "identity"}
        if have and expected is not None:
            headers["Range"] = f"bytes={have}-"
            if expected.sha256 is None and expected.etag is not None:
                headers["If-Range"] = expected.etag
        redirects = _Redirects()
        try:
            request = urllib.request.Request(remote.url, headers=headers)
            response = urllib.request.build_opener(redirects).open(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            self.answered = True
            error.close()
            if error.code == 416:
                raise _ForeignError("the file has changed on the server") from None
            if error.code in PASSING:
                after = _retry_after(error.headers)
                if after is not None and after > LONGEST_WAIT:
                    raise ValueError(f"{remote.url}: asks to wait for {after:.0f} s; try again then") from None
                raise _PassingError(f"HTTP {error.code} {error.reason}", after) from None
            raise ValueError(f"{remote.url}: HTTP {error.code} {error.reason}; check the address") from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError) or not self.answered:
                host = urllib.request.Request(remote.url).host
                reason = getattr(error.reason, "strerror", None) or error.reason
                raise ValueError(
                    f"cannot reach {host} ({reason}): connect to the network and try again, or put the files into "
                    f"{remote.path.parent} by hand"
                ) from None
            raise _PassingError(str(error.reason)) from None
        except (OSError, http.client.HTTPException) as error:
            raise _PassingError(str(error) or type(error).__name__) from None
        self.answered = True
        return response, redirects.linked

    def receive(self, remote: Remote, response: http.client.HTTPResponse, file: IO[bytes]) -> None:
        while True:
            try:
                chunk = response.read1(CHUNK)
            except (OSError, http.client.HTTPException) as error:
                raise _PassingError(str(error) or type(error).__name__) from None
            if not chunk:
                break
            file.write(chunk)
            self.arrived[remote.path] += len(chunk)
            if self.stop.is_set():
                raise _StoppedError
        file.flush()
        os.fsync(file.fileno())


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but only to https, and keeps the file's ETag that they state."""

    def __init__(self) -> None:
        self.linked: str | None = None

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if req.type == "https" and not newurl.startswith("https://"):
            raise ValueError(f"{req.full_url}: redirected to {newurl}, which is not https; check the address")
        self.linked = headers.get("X-Linked-ETag", self.linked)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _continue(
    response: http.client.HTTPResponse, linked: str | None, have: int, expected: Identity | None
) -> tuple[Identity, int]:
    """Return the file's identity and the offset at which the answer begins, 0 if it is the whole file."""
    if response.status != 206:
        length = response.headers.get("Content-Length")
        return Identity.of(response.headers, None if length is None else int(length), linked), 0
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
    identity = Identity.of(response.headers, int(found[2]) if found else None, linked)
    if expected is None or found is None or int(found[1]) != have or not identity.same(expected):
        raise _ForeignError("the file has changed on the server")
    return expected, have


def _fault(part: Path, expected: Identity) -> str | None:
    """Return the fault of a downloaded file; None if it is as the server states."""
    size = part.stat().st_size
    if expected.size is not None and size != expected.size:
        return f"{size} bytes arrived instead of {expected.size}"
    for name in ("sha256", "md5"):
        stated = getattr(expected, name)
        if stated is not None:
            with part.open("rb") as file:
                found = hashlib.file_digest(file, partial(hashlib.new, name, usedforsecurity=False)).hexdigest()
            if found != stated:
                return f"the download has {name} {found[:12]}…, the server states {stated[:12]}…"
    return None


def _read_note(note: Path) -> Identity | None:
    """Return the recorded identity of a partial download; None if it is unreadable."""
    try:
        return Identity(**json.loads(note.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _retry_after(headers: Message) -> float | None:
    """Return the seconds to wait, stated as a number or a date; None if the server states neither."""
    text = headers.get("Retry-After", "")
    if text.isdigit():
        return float(text)
    try:
        return max(email.utils.parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError):
        return None

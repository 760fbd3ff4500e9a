"""Names by which a server is reached."""

from __future__ import annotations

from urllib.parse import urlsplit


def host_name(header: str) -> str:
    """The name or address in a Host header, in lower case, without brackets and port; "" where it has none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""

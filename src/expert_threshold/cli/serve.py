"""`et serve`: serves a trained model over HTTP."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from ..generate.engine import Engine
from ..install import install
from ..option import Bounds, Count
from ..runs import RunFolder, load_model
from ..serve.worker import Limits, Worker
from ..train.checks import require_few
from .options import COMPUTE, STEP, Option, field_options, parse_all, picked_device

API_KEY = "ET_API_KEY"

OPTIONS = [
    Option("run", str, None, "The folder of the run to serve.", positional=True, required=True),
    Option("host", str, "127.0.0.1", "The address to listen on. Only loopback addresses keep other machines out."),
    Option("port", Annotated[int, Bounds(least=0, most=65535)], 8000, "The port to listen on. 0 picks a free port."),
    Option("name", str | None, None, "The model's name in requests. Defaults to the folder's name."),
    Option("compare", str, None, "Another run to show in the explorer for comparison. May be repeated.", many=True),
    Option("explorer", bool, False, "Serve the explorer at / to other machines too. A local server always serves it."),
    Option("public_host", str, None, "Host name under which a proxy exposes this server. May be repeated.", many=True),
    Option("cors", str, None, "An origin whose pages may call the API, or * for all. May be repeated.", many=True),
    Option("api_key", str | None, None, f"Key required on every route except /health. Defaults to {API_KEY}, if set."),
    Option("slots", Count, 8, "Number of texts to generate at the same time."),
    Option("strict", bool, False, "Compute row by row, so that other texts in the batch do not affect rounding."),
    STEP,
    *COMPUTE,
    Option("threads", Count | None, None, "Number of threads for matrix multiplications. Defaults to torch's choice."),
]
LOCAL = ("127.0.0.1", "localhost", "::1")
LIMITS = field_options(Limits, vars(Limits()), prefix="max_")


def run(arguments: Sequence[str]) -> None:
    """Serve until interrupted."""
    about = "Serve a trained model over HTTP, with OpenAI's completions API."
    options = parse_all("et serve", about, [*OPTIONS, *LIMITS], arguments)
    try:
        from ..serve.connections import bind, run_server
        from ..serve.explorer import Explored, routes
        from ..serve.server import create_app, host_name
    except ModuleNotFoundError as error:
        raise ValueError(f"et serve needs {error.name}, which is missing; run: {install('serve')}") from None
    if options["threads"] is not None:
        require_few(options["threads"])
    limits = Limits(**{option.name.removeprefix("max_"): options[option.name] for option in LIMITS})
    public = [name.lower() for name in options["public_host"] or []]
    for name in public:
        if host_name(name) != name:
            raise ValueError(f"--public-host {name} must be a plain host name, such as explorer.example.org")
    for origin in options["cors"] or []:
        if not re.fullmatch(r"\*|https?://[^\s/]+", origin):
            raise ValueError(f"--cors {origin} must be an origin, such as https://example.org, or * for all")
    local = is_local(options["host"])
    private = local and not public
    api_key = os.environ.get(API_KEY) if options["api_key"] is None else options["api_key"]
    if api_key is not None and not re.fullmatch("[!-~]+", api_key):
        raise ValueError(f"--api-key or {API_KEY} must be printable ASCII without spaces; or omit both")
    shown = private or options["explorer"]
    compared = options["compare"] or []
    if compared and not shown:
        raise ValueError(f"--compare {compared[0]} has no effect without the explorer; add --explorer")
    # Listen first, so that a failure is reported before a model is loaded.
    with contextlib.ExitStack() as listening:
        sockets = [listening.enter_context(each) for each in bind(options["host"], options["port"])]
        runs: list[Explored] = []
        for path, step in [(options["run"], options["step"]), *((path, None) for path in compared)]:
            name = (None if runs else options["name"]) or _unused(path, [run.name for run in runs])
            worker = Worker(_engine(path, step, options), limits.queue, options["threads"])
            runs.append(Explored(name, worker, RunFolder(Path(path)).report))
        app = create_app(
            [run.worker for run in runs],
            runs[0].name,
            limits=limits,
            api_key=api_key,
            hosts=tuple(dict.fromkeys((*LOCAL, options["host"], *public))) if local else None,
            origins=options["cors"] or (),
            routes=routes(runs, ("localhost", socket.gethostname(), options["host"]), public) if shown else (),
        )
        if not private:
            who, where = "anyone with the key" if api_key else "anyone", ", ".join((*public, options["host"]))
            print(f"et serve: {who} who can reach {where} can use this server", file=sys.stderr)
        run_server(app, sockets)


def _engine(path: str, step: int | None, options: Mapping[str, Any]) -> Engine:
    model, tokenizer = load_model(path, step, *picked_device(options))
    return Engine(model, tokenizer, slots=options["slots"], strict=options["strict"])


def _unused(path: str, names: Sequence[str]) -> str:
    """Return a name for a run that is not among `names`: its folder's name, its path, or its path with a number."""
    numbered = (f"{path} {number}" for number in itertools.count(2))
    return next(name for name in itertools.chain((Path(path).resolve().name, path), numbered) if name not in names)


def is_local(host: str) -> bool:
    """Return True if only this machine can reach a server on this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

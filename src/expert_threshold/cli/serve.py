"""`et serve`: a trained model over HTTP."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_type_hints

from ..generate.engine import Engine
from ..generate.serving.limits import Limits
from ..runs import load_model
from ..train.config import DeviceName, DtypeName
from ..train.device import pick_device, pick_dtype
from .options import Command, Option, field_comments, parse

API_KEY = "ET_API_KEY"

OPTIONS = [
    Option("run", str, None, "The folder of the run to serve.", positional=True, required=True),
    Option("host", str, "127.0.0.1", "The address to listen at; any but this machine's own lets others in."),
    Option("port", int, 8000, "0 takes a free one."),
    Option("name", str | None, None, "The model's name in requests; none is the folder's."),
    Option("api_key", str | None, None, f"Asked for on every route but /health; none takes that of {API_KEY}, if set."),
    Option("slots", int, 8, "Texts that are written at once."),
    Option("strict", bool, False, "Compute row by row: the same bits whoever shares the batch."),
    Option("step", int | None, None, "The checkpoint to use; none is the last."),
    Option("device", DeviceName, "auto", "Where to compute; auto is cuda where there is one, else cpu."),
    Option("dtype", DtypeName, "auto", "Type of the matrix products; auto is bfloat16 where the hardware has it."),
    Option("threads", int | None, None, "Of torch in products; none is torch's choice."),
]
KINDS, COMMENTS = get_type_hints(Limits), field_comments(Limits)
LIMITS = [
    Option("max_" + field.name, KINDS[field.name], field.default, COMMENTS[field.name])
    for field in dataclasses.fields(Limits)
]


def run(arguments: Sequence[str]) -> None:
    """Serve until interrupted."""
    groups = {"serve": OPTIONS, "limits": LIMITS}
    command = Command("et serve", "Serve a trained model over HTTP, in the form of OpenAI's completions.", groups)
    options = {option.name: option.default for option in command.options} | parse(command, arguments)
    try:
        from ..generate.server import create_app, run_server
    except ModuleNotFoundError as error:
        raise ValueError(f"et serve needs {error.name}: pip install 'expert-threshold[serve]'") from None
    limits = Limits(**{option.name.removeprefix("max_"): options[option.name] for option in LIMITS})
    local = is_local(options["host"])
    api_key = options["api_key"] or os.environ.get(API_KEY) or None
    device = pick_device(options["device"])
    model, tokenizer = load_model(options["run"], options["step"], device, pick_dtype(options["dtype"], device))
    engine = Engine(model, tokenizer, slots=options["slots"], strict=options["strict"])
    app = create_app(
        engine,
        options["name"] or Path(options["run"]).resolve().name,
        limits=limits,
        api_key=api_key,
        hosts=("127.0.0.1", "localhost", "[::1]", options["host"]) if local else None,
        threads=options["threads"],
    )
    if not local:
        who = "whoever has the key" if api_key else "anyone"
        print(f"et serve: listening at {options['host']}: {who} who reaches this machine can use it", file=sys.stderr)
    run_server(app, options["host"], options["port"])


def is_local(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

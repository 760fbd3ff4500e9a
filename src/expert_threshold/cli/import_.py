"""`et import`: creates a run folder from a model that `et export` wrote, fine-tuned or not."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ..install import et
from ..integrations.export import HUB, import_folder, model_folder
from .options import Option, parse_all

OPTIONS = [
    Option("folder", str, None, "The folder of the model, or hub:OWNER/NAME.", positional=True, required=True),
    Option("out", str, "runs/FOLDER", "The run folder to create, which must not exist.", derived=True),
]
DESCRIPTION = (
    "Create a run folder from a model that et export wrote, or that transformers saved after fine-tuning it.\n\n"
    "The new run can be used like any other, and et train --init-from can start training from it."
)


def run(arguments: Sequence[str]) -> None:
    """Create the run folder."""
    options = parse_all("et import", DESCRIPTION, OPTIONS, arguments)
    name = options["folder"]
    out = options["out"] or Path("runs") / Path(name.removeprefix(HUB)).resolve().name
    run = import_folder(model_folder(name), out)
    path = shlex.quote(str(run.path))
    print(f"{run.path}: weights of step {run.latest_checkpoint()}")
    print(f"next: {et()} generate {path}, or {et()} train --init-from {path}")

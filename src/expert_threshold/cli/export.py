"""`et export`: writes a trained model to a folder for Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Sequence

from ..integrations.export import export_run, push
from .options import STEP, Option, parse_all

OPTIONS = [
    Option("run", str, None, "The folder of the run to export.", positional=True, required=True),
    Option("to", str, None, "The folder to create.", required=True),
    Option("push", str | None, None, "Hub repository to upload to, as OWNER/NAME. New repositories are private."),
    STEP,
]
DESCRIPTION = (
    "Write a trained model to a folder for Hugging Face transformers. The folder contains the model's weights, "
    "configuration, tokenizer, code and card, so that it can be loaded without this package."
)


def run(arguments: Sequence[str]) -> None:
    """Write the folder."""
    options = parse_all("et export", DESCRIPTION, OPTIONS, arguments)
    folder = export_run(options["run"], options["to"], options["step"])
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 1e6:,.1f} MB")
    if options["push"] is not None:
        try:
            print(f"pushed to {push(folder, options['push'])}")
        except ValueError as error:
            raise ValueError(f"{error}; to upload the finished export: hf upload {options['push']} {folder}") from None
    print(f"next: AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)")

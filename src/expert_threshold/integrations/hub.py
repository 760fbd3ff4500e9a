"""Models on the Hugging Face hub: pushes exports, and reads `hub:OWNER/NAME` where a folder is expected."""

from __future__ import annotations

from pathlib import Path

from ..data.public import cache_folder, hub_errors
from .export import import_folder

PREFIX = "hub:"
FILES = ["*.json", "*.safetensors"]
"""All that `import_folder` reads: no code."""
WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
"""The files of an earlier push that would be read in place of new ones."""


def push(folder: Path, repository: str) -> str:
    """Upload an export, to a new private repository if there is none; return its address."""
    with hub_errors(repository, "uploaded to") as hub:
        api = hub.HfApi()
        address = str(api.create_repo(repository, private=True, exist_ok=True))
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=f"Upload {folder.name}", delete_patterns=WEIGHTS
        )
    return address


def model_folder(name: str) -> Path:
    """Return the folder of this name, after downloading it if the name is hub:OWNER/NAME."""
    if not name.startswith(PREFIX):
        return Path(name)
    repository = name.removeprefix(PREFIX)
    with hub_errors(repository) as hub:
        return Path(hub.snapshot_download(repository, allow_patterns=FILES))


def run_folder(name: str) -> str:
    """Return the run of this name; hub:OWNER/NAME is imported into the cache, once for each of its revisions."""
    if not name.startswith(PREFIX):
        return name
    snapshot = model_folder(name)  # named like the commit
    run = cache_folder() / "runs" / name.removeprefix(PREFIX) / snapshot.name
    return str(run if run.exists() else import_folder(snapshot, run).path)

"""Pushes exports to the Hugging Face hub and reads models from there, named `hub:OWNER/NAME` instead of a folder."""

from __future__ import annotations

from pathlib import Path

from ..data.public import cache_folder, hub_errors
from .export import import_folder

PREFIX = "hub:"
FILES = ["*.json", "*.safetensors"]
"""The files that `import_folder` reads, none of which is code."""
WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
"""Files of earlier pushes to delete, because they could be read instead of the new ones."""


def push(folder: Path, repository: str) -> str:
    """Upload an export and return its URL. If the repository does not exist, a private one is created."""
    with hub_errors(repository, "uploaded to") as hub:
        api = hub.HfApi()
        address = str(api.create_repo(repository, private=True, exist_ok=True))
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=f"Upload {folder.name}", delete_patterns=WEIGHTS
        )
    return address


def model_folder(name: str) -> Path:
    """Return the folder with this name, downloaded if the name is hub:OWNER/NAME."""
    if not name.startswith(PREFIX):
        return Path(name)
    repository = name.removeprefix(PREFIX)
    with hub_errors(repository) as hub:
        return Path(hub.snapshot_download(repository, allow_patterns=FILES))


def run_folder(name: str) -> str:
    """Return the run folder with this name. Each revision of hub:OWNER/NAME is imported into the cache once."""
    if not name.startswith(PREFIX):
        return name
    snapshot = model_folder(name)  # named after the commit
    run = cache_folder() / "runs" / name.removeprefix(PREFIX) / snapshot.name
    return str(run if run.exists() else import_folder(snapshot, run).path)

"""Exports the source of a routing rule as flat files next to a model, for use without this package."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from ..routing import Rule
from ..routing import __all__ as EXPORTED

ENTRY = "exported_rule.py"
"""The file that names the rule's class; `transformers.py` imports it."""
ROUTING = Path(inspect.getfile(Rule)).parent
OURS = re.compile(r"^(\s*)from expert_threshold(?:\.routing)? import", re.MULTILINE)
SIBLING = re.compile(r"^(\s*)from \.(\w+) import", re.MULTILINE)
PACKAGE = re.compile(r"^\s*(?:from|import) expert_threshold\b.*$", re.MULTILINE)


def rule_files(rule: Rule | None) -> dict[str, str]:
    """Return the files that the rule's class needs, keyed by name. For dense models, RULE is None.

    A rule from another package must be a single file that imports nothing from this package except
    `expert_threshold.routing`. Raises ValueError if it is not, or if its source cannot be found.
    """
    if rule is None:
        return {ENTRY: '"""This model is dense and has no routing rule."""\n\nRULE = None\n'}
    cls = type(rule)
    try:
        path = Path(inspect.getfile(cls))
        text = path.read_text(encoding="utf-8")
    except (OSError, TypeError):
        raise ValueError(f"the source of rule {cls.__name__} cannot be found; define it in a module") from None
    name = path.stem if path.parent == ROUTING else f"rule_{path.stem}"
    if path.parent != ROUTING:
        _require_alone(path, text)
        text = OURS.sub(r"\1from .routing import", text)
        if left := PACKAGE.search(text):
            raise ValueError(f"{path}: {left[0].strip()!r}: an exported rule may import only expert_threshold.routing")
    files: dict[str, str] = {}
    _add(files, name, text)
    files[ENTRY] = f'"""The routing rule of this model."""\n\nfrom .{_flat(name)} import {cls.__name__} as RULE\n'
    return files


def _flat(module: str) -> str:
    """Return a module's name in an exported folder, where a file with the package's name would shadow the package."""
    return "routing_expert_threshold" if module == "expert_threshold" else module


def _require_alone(path: Path, text: str) -> None:
    """Raise ValueError if a rule's file imports neighbouring files or names that `routing` does not export."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise ValueError(f"{path} imports neighbouring files; an exported rule must be a single file")
        if isinstance(node, ast.ImportFrom) and node.module == "expert_threshold":
            for name in {alias.name for alias in node.names}.difference(EXPORTED):
                raise ValueError(f"{path}: {name!r}: an exported rule may import only expert_threshold.routing")


def _add(files: dict[str, str], module: str, text: str) -> None:
    """Add a module and, recursively, the modules of `routing` that it imports, including `option.py` one folder up."""
    if (file := f"{_flat(module)}.py") in files:
        return
    text = text.replace("from ..option import", "from .option import")
    files[file] = SIBLING.sub(lambda found: f"{found[1]}from .{_flat(found[2])} import", text)
    places = {"routing": ROUTING / "__init__.py", "option": ROUTING.parent / "option.py"}
    for _, needed in SIBLING.findall(text):
        _add(files, needed, places.get(needed, ROUTING / f"{needed}.py").read_text(encoding="utf-8"))

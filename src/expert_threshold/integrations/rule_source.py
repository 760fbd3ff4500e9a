"""The source of a routing rule as files that lie flat beside an exported model, for where this package is absent."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from ..routing import Rule

ENTRY = "exported_rule.py"
"""Names the rule's class; what `transformers.py` imports."""
ROUTING = Path(inspect.getfile(Rule)).parent
OURS = re.compile(r"^(\s*)from expert_threshold(?:\.routing)? import", re.MULTILINE)
SIBLING = re.compile(r"^\s*from \.(\w+) import", re.MULTILINE)
PACKAGE = re.compile(r"^\s*(?:from|import) expert_threshold\b.*$", re.MULTILINE)


def rule_files(rule: Rule | None) -> dict[str, str]:
    """Return the texts of all files that the rule's class needs, by name; none for a dense model.

    A rule of another distribution is one file that imports, of this package, `expert_threshold.routing` alone.
    Raises ValueError for one that is not, or whose source is not to be had.
    """
    if rule is None:
        return {}
    cls = type(rule)
    try:
        path = Path(inspect.getfile(cls))
        text = path.read_text(encoding="utf-8")
    except (OSError, TypeError):
        raise ValueError(
            f"rule {cls.__name__}: its source is not to be had, so the folder would not load; define it in a module"
        ) from None
    name = path.name if path.parent == ROUTING else f"rule_{path.stem}.py"
    if path.parent != ROUTING:
        if SIBLING.search(text):
            raise ValueError(f"{path}: imports files beside it; a rule that is exported must be one file")
        text = OURS.sub(r"\1from .routing import", text)
        if left := PACKAGE.search(text):
            raise ValueError(f"{path}: {left[0].strip()!r} is more than a rule may import; use its routing")
    files = {ENTRY: f'"""The routing rule of this model."""\n\nfrom .{Path(name).stem} import {cls.__name__} as RULE\n'}
    _add(files, name, text)
    return files


def _add(files: dict[str, str], name: str, text: str) -> None:
    """Add a file, and of `routing` those that it imports."""
    if name in files:
        return
    files[name] = text
    for needed in SIBLING.findall(text):
        source = ROUTING / ("__init__.py" if needed == "routing" else f"{needed}.py")
        _add(files, f"{needed}.py", source.read_text(encoding="utf-8"))

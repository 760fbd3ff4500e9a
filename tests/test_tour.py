"""The tour's links point at the lines they name. `python tests/test_tour.py` corrects their numbers."""

from __future__ import annotations

import re
from pathlib import Path

TOUR = Path(__file__).parents[1] / "docs" / "tour.md"
LINK = re.compile(r"\[`(\w+)`\]\((\.\./[\w/.]+)#L(\d+)\)")


def line_of(name: str, path: Path) -> int:
    """Returns the number of the line where a module defines a name. Raises ValueError if it does not."""
    definition = re.compile(rf"(def|class) {name}\b|{name}\b.*=")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if definition.match(line):
            return number
    raise ValueError(f"{path} does not define {name}")


def corrected(page: str) -> str:
    """Returns the page with the line numbers that the files have now."""
    return LINK.sub(lambda m: f"[`{m[1]}`]({m[2]}#L{line_of(m[1], (TOUR.parent / m[2]).resolve())})", page)


def test_links_of_the_tour_point_at_the_lines_they_name() -> None:
    page = TOUR.read_text(encoding="utf-8")
    assert len(LINK.findall(page)) > 30
    assert page == corrected(page), "run python tests/test_tour.py"


if __name__ == "__main__":
    TOUR.write_text(corrected(TOUR.read_text(encoding="utf-8")), encoding="utf-8")

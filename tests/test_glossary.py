"""The words are explained once, and the same everywhere."""

from __future__ import annotations

from pathlib import Path

from expert_threshold import glossary
from expert_threshold.serve import explorer

ROOT = Path(__file__).parents[1]


def test_the_page_of_words_says_what_help_and_pages_say() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in page.splitlines() if line[:1] == "|"]
    assert dict(rows[2:]) == glossary.TERMS
    assert "docs/glossary.md" in (ROOT / "README.md").read_text(encoding="utf-8").split("## Why")[0]


def test_the_words_fit_a_screen() -> None:
    lines = glossary.as_text().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 140
    assert all(meaning.endswith(".") for meaning in glossary.TERMS.values())


def test_the_explorer_explains_the_words_before_it_uses_them() -> None:
    page = (explorer.STATIC / "index.html").read_text(encoding="utf-8")
    assert page.index("<!-- glossary -->") < page.index("</header>")

"""Pages in a browser: values under the pointer, logarithmic axes, values as a table, long names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from browser import CHROMIUM, Page, open_page
from expert_threshold.analysis.figures.learning import draw_losses
from expert_threshold.analysis.page import exhibit, exhibits, page, table

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
LONG = "a_run_whose_name_is_fifty_characters_long_or_more_"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("page")
    curve = {"method": "ET <b>", "kind": "expert_threshold", "points": [[1, 5.0], [10, 4.0], [100, 3.0], [1000, 2.0]]}
    drawn = exhibit("Loss", lambda: ("A caption.", draw_losses({"methods": [curve]})))
    rows = [[LONG, *map(str, range(8))], ["other", *map(str, range(8))]]
    wide = table(["method", *(f"a column number {n}" for n in range(8))], rows, "Numbers")
    (folder / "page.html").write_text(page("Page", [f"<h1>{LONG}</h1>", wide, exhibits("Figures", [drawn])]))
    with open_page() as tab:
        tab.resize(1200, 900)
        tab.go((folder / "page.html").as_uri())
        tab.until("document.readyState === 'complete' && document.querySelector('.scales button')")
        yield tab


def test_the_value_nearest_to_the_pointer_is_shown(tab: Page) -> None:
    tab.hover("figure svg")
    assert tab.run("document.querySelector('.tip').textContent").split("\n")[0] == "ET <b>"


def test_an_axis_becomes_logarithmic_and_linear_again(tab: Page) -> None:
    d = "document.querySelector('[id*=-axes_] > g > path[clip-path]').getAttribute('d')"
    linear = tab.run(d)
    tab.run("document.querySelector('.scales button').click()")
    x = [float(x) for x in tab.run(f"{d}.match(/[ML] \\S+/g).map(point => point.slice(2))")]
    assert x[-1] - x[-2] == pytest.approx(x[-2] - x[-3], rel=1e-3)  # 10, 100 and 1000 are equally far apart
    tab.run("document.querySelector('.scales button').click()")
    assert [float(n) for n in tab.run(f"{d}.match(/[0-9.]+/g)")] == pytest.approx(
        [float(n) for n in tab.run(f"{linear!r}.match(/[0-9.]+/g)")]
    )


def test_the_values_of_a_chart_open_as_a_table(tab: Page) -> None:
    tab.click("details.values summary")
    tab.until("document.querySelector('details.values table')")
    rows = "[...document.querySelectorAll('details.values tr')]"
    cells = f"{rows}.map(row => [...row.cells].map(cell => cell.textContent))"
    assert tab.run(cells) == [["tokens trained on", "ET <b>"], ["1", "5"], ["10", "4"], ["100", "3"], ["1,000", "2"]]


@pytest.mark.parametrize("width", [390, 1200, 1920])
def test_no_page_scrolls_sideways_and_wide_screens_show_every_column(tab: Page, width: int) -> None:
    tab.resize(width, 900)
    assert tab.run("document.documentElement.scrollWidth") == width
    if width > 390:
        assert tab.run("(box => box.scrollWidth <= box.clientWidth)(document.querySelector('.scroll'))")
    assert not tab.complaints

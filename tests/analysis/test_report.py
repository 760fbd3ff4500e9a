"""The report of a run: every figure that has numbers, reasons for the others, and nothing that a page must not hold."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from expert_threshold.analysis.figures import training
from expert_threshold.analysis.figures.learning import draw_losses
from expert_threshold.analysis.figures.plot import GREY, HEAT, LONGEST, ORANGE, deviations, single, smooth, thin
from expert_threshold.analysis.figures.style import style
from expert_threshold.analysis.page import CSS, SCRIPT, svg
from expert_threshold.analysis.records import expert_series, finite, layer_series, mean_loss, series
from expert_threshold.analysis.report import write_report
from expert_threshold.compare.judgement import Findings, read_runs
from expert_threshold.compare.page import write_page
from expert_threshold.runs import RunFolder
from tiny_runs import SAMPLE, copy_run

RULES = {"expert_threshold": "et", "expert_choice": "ec-batch", "token_choice": "tc", "dense": "dense"}
"""The rule -> the folder of its run."""
OF_EVERY_RUN = {"Loss", "Bits per byte", "Tokens per second", "Learning rate", "Gradient norm"}
OF_EXPERTS = {"Usage of each expert", "Load spread", "Fanout", "Spread of scores", "Spread of gates"}
OF_CUTOFFS = {"Cutoffs", "Saturation", "Starvation"}
FIGURES = {"dense": OF_EVERY_RUN, "token_choice": OF_EVERY_RUN | OF_EXPERTS}
FIGURES |= dict.fromkeys(("expert_threshold", "expert_choice"), OF_EVERY_RUN | OF_EXPERTS | OF_CUTOFFS)


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Callable[..., RunFolder]:
    """A copy of the run by a rule, expert threshold unless another is named, changed as `copy_run` does."""
    return lambda name="expert_threshold", *change: copy_run(runs / RULES[name], tmp_path / name, *change)


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave drawings, which take most of the time, out of pages."""
    monkeypatch.setattr("expert_threshold.analysis.page.svg", lambda *_: "")


@pytest.fixture(autouse=True)
def figures_for_expert_threshold_alone(request: pytest.FixtureRequest) -> None:
    """Draw figures only in the tests' cases of expert threshold, the rule that has them all."""
    if "name" in request.fixturenames and request.getfixturevalue("name") != "expert_threshold":
        request.getfixturevalue("without_figures")


class Page:
    """A page and its elements, without style and scripts. Fails unless every element is closed where it should be."""

    def __init__(self, html: str) -> None:
        self.html = html
        xml = re.sub(r"<!DOCTYPE html>|xlink:|<(style|script)\b.*?</\1>", "", html, flags=re.DOTALL)
        self.root = ElementTree.fromstring(re.sub(r"<(meta|link)\b[^>]*", r"\g<0>/", xml))

    def texts(self, tag: str) -> list[str]:
        return ["".join(element.itertext()) for element in self.root.iter(tag)]


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The report of the expert-threshold run."""
    return page_of(copy_run(runs / "et", tmp_path_factory.mktemp("report") / "run"))


def page_of(folder: RunFolder) -> Page:
    assert write_report(folder) == folder.report
    return Page(folder.report.read_text(encoding="utf-8"))


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("name", RULES)
def test_a_report_has_the_figures_that_the_rule_has_numbers_for_and_reasons_for_the_others(
    name: str, run: Callable[..., RunFolder]
) -> None:
    page = page_of(run(name))
    assert set(page.texts("h3")) == FIGURES[name]
    assert len(page.texts("figcaption")) == len(FIGURES[name])
    for caption in page.texts("figcaption"):
        assert re.search(r"\d", caption), caption
        assert "nan" not in caption
    assert page.texts("h1")[0].startswith(name.replace("_", " ").capitalize())
    assert {"Samples", "Configuration", "Learning"} <= set(page.texts("h2"))
    reasons = {"dense": "no layer of this model has routed experts", "token_choice": "has no cutoffs"}
    assert ("Left out" in page.texts("h2")) == (name in reasons)
    for title in (OF_EXPERTS | OF_CUTOFFS) - FIGURES[name]:
        assert re.search(f"{title}[^.]*{reasons[name]}", page.texts("ul")[-1])


def test_a_page_asks_no_other_host_and_runs_no_script_but_its_own(report: Page) -> None:
    assert not {"iframe", "object", "embed"} & {element.tag for element in report.root.iter()}
    *charts, script = re.findall(r"<script.*?>(.*?)</script>", report.html, flags=re.DOTALL)
    assert script.strip() == SCRIPT.strip()
    assert all(json.loads(chart) for chart in charts)
    for element in report.root.iter():
        for name, value in element.items():
            if name in ("src", "href", "action", "data", "srcset"):
                assert value.startswith(("data:", "#")), (element.tag, name, value)
            assert not name.startswith("on"), (element.tag, name)
    assert "@import" not in report.html
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", report.html))
    without_samples = re.sub(r"<pre>.*?</pre>", "", report.html, flags=re.DOTALL)
    assert not re.search(r"https?:", without_samples)


def test_text_of_samples_is_shown_and_not_obeyed(report: Page) -> None:
    texts = report.texts("pre")
    shown = SAMPLE.replace("\x00", "\ufffd").replace("\x0c", "\ufffd")
    assert texts[0] == f"step 8 {shown}"
    assert texts[1] == f"step 4 {shown}"


def test_ids_are_unique_and_what_is_referred_to_exists(report: Page) -> None:
    ids = [element.get("id") for element in report.root.iterfind(".//*[@id]")]
    assert 0 < len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', report.html)) <= set(ids)


def test_pages_and_figures_follow_the_theme(report: Page) -> None:
    for name in set(re.findall(r"var\(--([\w-]+)\)", report.html)):
        assert report.html.count(f"--{name}:#") == 2, name
    assert re.search(r"prefers-color-scheme: dark\) { svg { filter: invert", CSS)
    assert "background" not in "".join(re.findall(r"<svg.*?</svg>", report.html, flags=re.DOTALL))


def test_figures_are_named_for_those_who_do_not_see_them(report: Page) -> None:
    named = {image.attrib["aria-label"].removeprefix("Chart: ") for image in report.root.iter("svg")}
    assert named == FIGURES["expert_threshold"]
    assert all(image.get("role") == "img" for image in report.root.iter("svg"))


def test_the_same_records_make_the_same_page(report: Page, runs: Path, tmp_path: Path) -> None:
    assert page_of(copy_run(runs / "et", tmp_path / "run")).html == report.html


def nulls(value: Any) -> Any:
    """Every measured number as a run writes what is not finite."""
    if isinstance(value, float):
        return None
    if isinstance(value, list):
        return [nulls(item) for item in value]
    return {key: nulls(item) for key, item in value.items()} if isinstance(value, dict) else value


def only(split: str, step: int, record: Any) -> Any:
    return record if (record["split"], record["step"]) == (split, step) else None


def some(record: Any) -> Any:
    return nulls(record) | {"seconds": record.get("seconds")} if record["step"] in (2, 3, 6) else record


CHANGES: dict[str, Callable[[Any], Any]] = {
    "every record": lambda record: None,
    "every number": lambda record: nulls(record) | {"seconds": 1.5},
    "numbers of some records": some,
    "all but one training record": partial(only, "train", 1),
    "all but one validation": partial(only, "validation", 2),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("missing", CHANGES)
def test_a_run_has_a_report_whatever_is_missing(name: str, missing: str, run: Callable[..., RunFolder]) -> None:
    page = page_of(run(name, CHANGES[missing]))
    shown = set(page.texts("h3"))
    assert shown <= {"Fanout"} if missing.startswith("every") else {"Loss"} <= shown <= FIGURES[name]
    assert not any("nan" in caption for caption in page.texts("figcaption"))
    if missing == "every record":
        assert "Loss: the run has not recorded its numbers yet" in page.texts("ul")[-1]


def test_a_figure_that_fails_is_named_and_the_others_are_shown(
    run: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training.plot, "deviations", lambda *_, **__: 1 / 0)
    said: list[str] = []
    page = Page(write_report(run(), said.append).read_text(encoding="utf-8"))
    assert set(page.texts("h3")) == FIGURES["expert_threshold"]
    assert len(page.texts("figcaption")) == len(FIGURES["expert_threshold"]) - 1
    (line,) = said
    assert "Usage of each expert" in line
    assert "ZeroDivisionError" in line


@pytest.mark.usefixtures("without_figures")
def test_a_run_whose_scores_collapsed_has_every_figure(run: Callable[..., RunFolder]) -> None:
    """Distances divided by a standard deviation of 0 left it without a report."""

    def collapsed(record: dict[str, Any]) -> dict[str, Any]:
        for layer in record["layers"].values() if record["split"] == "train" else ():
            layer |= {"score_std": [0.0] * 4, "gate_std": [0.0] * 4}
        return record

    assert len(page_of(run("expert_threshold", collapsed)).texts("figcaption")) == len(FIGURES["expert_threshold"])


@pytest.mark.usefixtures("without_figures")
def test_events_are_reported(run: Callable[..., RunFolder]) -> None:
    folder = run()
    folder.metrics.append({"step": 4, "split": "event", "event": "dead_expert", "layer": 2, "expert": 3})
    folder.metrics.append({"step": 5, "split": "event", "event": "skipped_step", "in_a_row": 1})
    folder.metrics.append({"step": 6, "split": "event", "event": "skipped_step", "in_a_row": 2})
    text = " ".join(page_of(folder).texts("p"))
    assert "expert 3 of layer 2 (up to step 4)" in text
    assert "steps 5, 6" in text


def styled(draw: Callable[..., Figure], *arguments: Any) -> Figure:
    with style():
        return draw(*arguments)


def chart(title: str) -> training.Chart:
    return next(each for each in (*training.LEARNING, *training.ROUTING) if each.title == title)


def run_of(train: Any = (), validation: Any = (), **others: Any) -> Any:
    """A run that recorded these lines."""
    known = {"train": train, "validation": validation, "target": 0.5, "warmup_steps": 2}
    return SimpleNamespace(**known, rule=SimpleNamespace(experts_per_token=1), **others)


@pytest.mark.usefixtures("without_figures")
def test_a_comparison_shows_the_options_that_differ(runs: Path, tmp_path: Path) -> None:
    for name in ("expert_threshold", "expert_choice"):
        shutil.copytree(runs / RULES[name], tmp_path / name / "seed_0")
    write_page(Findings("Two", read_runs(tmp_path), "expert_choice", 0.01), tmp_path)
    shown = (tmp_path / "compare.html").read_text()
    table = shown[shown.index("Options that differ</h2>") :]
    for cells in (["rule.name", "expert_threshold", "expert_choice"], ["rule.warmup_steps", "3", "–"]):
        assert "".join(f"<td>{cell}</td>" for cell in cells) in table
    assert "seed" not in table.partition("</table>")[0]


def test_the_loss_figure_shows_the_records(run: Callable[..., RunFolder]) -> None:
    records = run().metrics.read()
    train, validation = ([r for r in records if r["split"] == split] for split in ("train", "validation"))
    raw, smoothed, measured = styled(training.draw_loss, run_of(train, validation)).axes[0].lines
    assert raw.get_xydata().tolist() == [[r["step"], r["cross_entropy"]] for r in train]
    assert len(smoothed.get_xydata()) == len(train)
    assert measured.get_xydata().tolist() == [[r["step"], r["loss"]] for r in validation]


def test_the_figures_of_layers_show_the_records(run: Callable[..., RunFolder]) -> None:
    train = [r for r in run().metrics.read() if r["split"] == "train"]
    first, second, *_ = styled(chart("Saturation").draw, run_of(train)).axes[0].lines
    for line, layer in ((first, "1"), (second, "2")):
        expected = [[r["step"], 100 * np.mean(r["layers"][layer]["saturation"])] for r in train]
        np.testing.assert_allclose(line.get_xydata(), expected)
    panels = styled(training.draw_cutoffs, run_of(train)).axes
    assert [panel.get_title(loc="left") for panel in panels[:2]] == ["layer 1, score", "layer 2, score"]
    batch_cutoffs, means = panels[1].lines[:4], panels[1].lines[4:8]
    for lines, name in ((means, "cutoff"), (batch_cutoffs, "batch_cutoff")):
        assert np.transpose([line.get_ydata() for line in lines]).tolist() == [r["layers"]["2"][name] for r in train]


def test_the_fanout_figure_shows_shares_of_the_tokens() -> None:
    bars = styled(training.draw_fanout, run_of(fanout_counts={1: [50, 30, 20, 0, 0]})).axes[0].patches
    assert [bar.get_height() for bar in bars] == pytest.approx([50, 30, 20, 0, 0])


def test_usage_is_drawn_for_the_nearest_record() -> None:
    steps = [1, 2, 3, 4, 100]
    train = [{"step": s, "layers": {"1": {"usage": [0.5, 1.0 if s == 100 else 0.25]}}} for s in steps]
    (image,) = styled(training.draw_usage, run_of(train)).axes[0].images
    assert np.asarray(image.get_array()).tolist() == [[0] * 5, [-1, -1, -1, 1, 1]]  # doublings of the target


def test_deviations_are_coloured_by_side_and_size() -> None:
    ratio = np.array([[0, 0.5, 2**-0.5, 1, 2**0.5, 2, 8, math.nan]])
    colours = deviations(single(4)[1], ratio).to_rgba(np.log2(np.maximum(ratio, 1e-9)))[0]
    np.testing.assert_allclose(colours[:7, 3], [1, 1, 0.5, 0, 0.5, 1, 1], atol=0.01)
    for some, colour in ((colours[:3], ORANGE), (colours[4:7], HEAT), (colours[7:], GREY)):
        np.testing.assert_allclose(some[:, :3], [colour] * len(some), atol=0.01)


def test_losses_by_method_end_in_their_names() -> None:
    curves = {"dense": [(1e6, 3.0), (2e6, 2.5)], "expert {threshold} $x$": [(1e6, 2.9), (2e6, None)], "none": []}
    methods = [{"method": name, "kind": name, "points": points} for name, points in curves.items()]
    axes = styled(draw_losses, {"methods": methods}).axes[0]
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert named == ["expert {threshold} $x$  2.900", "dense  2.500"]
    assert axes.lines[0].get_xydata().tolist() == [[1e6, 3.0], [2e6, 2.5]]
    assert {"1M", "2M"} <= {tick.get_text() for tick in axes.get_xticklabels()}


def test_a_figure_becomes_an_element_with_text_as_text() -> None:
    figure = styled(chart("Bits per byte").draw, run_of(bits_per_byte=[(1e6, 1.5), (2e6, 1.25)]))
    element = svg(figure, "own", "Bits & bytes")
    assert element.startswith("<svg ")
    assert 'aria-label="Bits &amp; bytes"' in element
    assert "1.250</text>" in element
    assert "xmlns" not in element


@given(st.lists(st.floats(-1e6, 1e6), max_size=200))
def test_smoothing_keeps_within_the_numbers_and_a_constant_as_it_is(values: list[float]) -> None:
    points = list(enumerate(values))
    smoothed = smooth(points)
    assert [x for x, _ in smoothed] == [x for x, _ in points]
    assert all(min(values) - 1e-6 <= y <= max(values) + 1e-6 for _, y in smoothed)
    assert smooth([(x, 2.5) for x, _ in points]) == [(x, 2.5) for x, _ in points]
    assert smooth([*points, (len(points), math.nan)])[: len(points)] == smoothed


@pytest.mark.parametrize(
    ("count", "lines", "points"), [(10_000, 1, LONGEST), (10_000, 1000, 24), (10_000, 10**6, 2), (2, 1, 2)]
)
def test_long_lines_are_thinned_and_keep_both_ends(count: int, lines: int, points: int) -> None:
    steps = np.arange(count)
    few, values = thin(steps, steps[:, None] * 2.0, lines)
    assert len(few) == points
    assert (few[0], few[-1]) == (0, count - 1)
    assert (values[:, 0] == 2 * few).all()


def test_series_tell_what_was_not_finite() -> None:
    records: list[dict[str, Any]] = [
        {"step": 1, "loss": 2.0, "layers": {"10": {"a": 1.0, "b": [1.0, 4.0]}, "9": {"a": None, "b": [None, None]}}},
        {"step": 2, "loss": None, "layers": {"10": {"a": 3.0, "b": [3.0, None]}}},
    ]
    assert finite(series(records, "loss")) == [(1, 2.0)]
    assert math.isnan(series(records, "loss")[1][1])
    assert layer_series(records, "a") == {10: [(1, 1.0), (2, 3.0)]}
    assert layer_series(records, "b") == {10: [(1, 2.5), (2, 3.0)]}  # the mean of the experts that have a number
    assert expert_series(records, "b").keys() == {10}
    assert expert_series(records, "a") == {}  # as a rule has that describes one cutoff for all experts
    assert series(records, "absent") == []


def records_of(key: str, values: list[Any]) -> list[dict[str, Any]]:
    return [{"step": step, "steps": 1, "layers": {"1": {key: value}}} for step, value in enumerate(values, start=1)]


def test_the_late_loss_does_not_depend_on_how_often_it_is_logged() -> None:
    """With 20 steps a line, the losses before the last tenth entered it."""
    losses = [100 / step for step in range(1, 101)]

    def logged(every: int) -> list[dict[str, Any]]:
        ends = [*range(every, 100, every), 100]
        starts = [0, *ends[:-1]]
        return [
            {"step": end, "steps": end - start, "cross_entropy": sum(losses[start:end]) / (end - start)}
            for start, end in zip(starts, ends, strict=True)
        ]

    late = sum(losses[90:]) / 10
    for every in (1, 2, 5, 10):
        assert mean_loss(logged(every), 0.9, 100) == pytest.approx(late)
    assert mean_loss(logged(3), 0.9, 100) == pytest.approx(late)  # lines of three steps, and one of the last
    assert mean_loss(logged(20), 0.9, 100) is None
    assert mean_loss([], 0.9, 100) is None


def test_sentences_are_computed_from_the_numbers() -> None:
    losses = [{"step": step, "steps": 1, "cross_entropy": loss} for step, loss in ((1, 5.0), (8, 3.0), (10, 2.0))]
    text = training.say_loss(run_of(losses, [{"step": 5, "loss": 2.5}, {"step": 10, "loss": 3.5}]))
    assert "from 5.000 at step 1 to 2.000 at step 10" in text
    assert "validation ended at 3.500, 1.000 above the mean training loss" in text
    assert text.endswith("; the lowest was 2.500 at step 5.")
    usage = training.say_usage(run_of(records_of("usage", [[0.5, 0.5]] * 3 + [[0.9, 0.1]])))
    assert "10 % (expert 1 of layer 1) to 90 % (expert 0 of layer 1)" in usage
    assert "1 of 2 experts got between half and twice the target" in usage
    dropped = chart("Saturation").say(run_of(records_of("saturation", [0.9, 0.1, 0.3])))
    assert dropped.startswith("It went from 90 % at step 1 to 30 % at step 3; the lowest is 10 %, at step 2")
    fanout = training.say_fanout(run_of(fanout_counts={1: [1, 1, 2, 0]}))
    assert "went to 1.25 routed experts" in fanout
    assert fanout.endswith("no token went to more than 2.")
    bits = chart("Bits per byte").say(run_of(bits_per_byte=[(1000, 2.0), (2000, 1.5), (3000, 1.75)]))
    assert bits.startswith("It went from 2.000 after 1k tokens to 1.750 after 3k tokens; the lowest is 1.500, after 2k")
    spreads = {"1": {"score_std": 2.0}, "2": {"score_std": [1.0, 2.0]}}
    lines = chart("Spread of scores").say(run_of([{"step": 4, "layers": spreads}]))
    assert "from 1.5–2 at step 4 to 1.5–2 at step 4; the lowest is 1.5, at step 4 (layer 2)" in lines
    layers = {"1": {"cutoff": [1.0, -2.0], "cutoff_distance": [0.3, 0.4], "score_std": 2.0}}
    told = training.say_cutoffs(run_of([{"step": step, "steps": 1, "layers": layers} for step in (1, 2)]))
    assert "between −2.00 and 1.00" in told
    assert "lay on average 0.350 from the cutoff that its scores were compared with" in told

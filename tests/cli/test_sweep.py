"""`et sweep`: spaces, repeated and failed trials, interruptions, best options, and one-line errors."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from cases import et, said
from commands import Experiment, Options, Refused, edit, read
from expert_threshold.cli.compare import best_options, configure
from expert_threshold.cli.run_options import Given, resolve_run
from expert_threshold.cli.sweep import read_space, tunable
from expert_threshold.compare import sweep
from expert_threshold.compare.sweep import Trial, best_of
from expert_threshold.install import install
from expert_threshold.runs import RunFolder

METHODS = ["dense", "expert_threshold"]


def studies_of(out: Path) -> Any:
    return read(out / "sweep.json")["studies"]


@pytest.fixture(scope="session")
def small(small: Options) -> Options:
    """Options of trials with two validations each."""
    return [*small, "--layers", 2, "--num-experts", 4, "--steps", 4]


@pytest.fixture
def finished(search: Experiment) -> Path:
    return search.out


@pytest.fixture
def copy(search: Experiment, tmp_path: Path) -> Experiment:
    return search.copy(tmp_path / "copy")


def test_each_method_has_its_trials_inside_the_space(finished: Path) -> None:
    studies = studies_of(finished)
    assert list(studies) == METHODS
    assert studies["dense"]["options"].keys() == {"optim.matrix_lr", "optim.betas"}  # it has no rule's warmup
    assert studies["expert_threshold"]["options"].keys() == {"optim.matrix_lr", "optim.betas", "rule.warmup_steps"}
    for method, study in studies.items():
        assert [trial["trial"] for trial in study["trials"]] == [1, 2, 3]
        for trial in study["trials"]:
            assert trial["state"] == "finished"
            assert [step for step, _ in trial["curve"]] == [2, 4]
            assert trial["curve"][-1][1] == trial["loss"]
            assert 0.005 <= trial["options"]["optim.matrix_lr"] <= 0.1
            run = RunFolder.open(finished / method / f"trial_{trial['trial']:03d}" / "seed_1000")
            assert run.section("optim")["matrix_lr"] == trial["options"]["optim.matrix_lr"]
            assert run.section("train")["seed"] == 1000
            assert not run.checkpoints()
        assert study["best"] == min(study["trials"], key=lambda trial: float(trial["loss"]))
        assert len({trial["options"]["optim.matrix_lr"] for trial in study["trials"]}) == 3


def test_the_first_trials_have_the_present_options_and_then_cover_the_space(finished: Path) -> None:
    from optuna.distributions import FloatDistribution

    studies = studies_of(finished)
    for study in studies.values():
        first = study["trials"][0]
        assert first["present"]
        assert first["options"]["optim.matrix_lr"] == 0.02
        assert first["options"]["optim.betas"] == "0.9,0.95"
        assert study["present"] == first["loss"]
    space: sweep.Space = {
        "optim.matrix_lr": sweep.Dimension("", FloatDistribution(0.005, 0.1, log=True)),
        "optim.betas": sweep.Dimension("", None, {"0.9,0.95": (0.9, 0.95), "0.8,0.95": (0.8, 0.95)}),
    }
    spread = [trial["options"] for trial in studies["dense"]["trials"][1:]]
    assert spread == [sweep.spread(space, 0), sweep.spread(space, 1)]


def test_a_spread_covers_every_range_evenly() -> None:
    from optuna.distributions import FloatDistribution, IntDistribution

    space: sweep.Space = {
        "rate": sweep.Dimension("", FloatDistribution(0.01, 0.16, log=True)),
        "steps": sweep.Dimension("", IntDistribution(0, 3)),
        "choice": sweep.Dimension("", None, {"a": 1, "b": 2, "c": 3, "d": 4}),
    }
    drawn = [sweep.spread(space, number) for number in range(4)]
    assert sorted(int(math.log2(options["rate"] / 0.01)) for options in drawn) == [0, 1, 2, 3]
    assert sorted(options["choice"] for options in drawn) == ["a", "b", "c", "d"]
    assert all(isinstance(options["steps"], int) and 0 <= options["steps"] <= 3 for options in drawn)
    assert drawn == [sweep.spread(space, number) for number in range(4)]


def test_the_best_options_are_a_file_that_a_run_takes_as_it_is(finished: Path) -> None:
    for method in METHODS:
        best = studies_of(finished)[method]["best"]["options"]
        config = resolve_run({"preset": "tiny", "config": str(finished / method / "best.json")})
        assert config.optim.matrix_lr == best["optim.matrix_lr"]
        assert ",".join(map(str, config.optim.betas)) == best["optim.betas"]
        assert config.train.steps == 100  # the preset's, not that of the trials
        assert config.model.d_model == 32
        if method == "dense":
            assert config.model.rule is None
        else:
            assert vars(config.model.rule)["warmup_steps"] == best["rule.warmup_steps"]
            assert config.model.rule.num_experts == 4


def test_a_comparison_gives_each_method_its_best_options_and_its_kin_those_of_the_rule(finished: Path) -> None:
    names = ["dense", "expert_threshold", "expert_threshold_last_batch"]
    files = best_options([str(finished)], names)
    configs = configure({"preset": "tiny", "rule.decay": 0.9}, names, files)
    studies = studies_of(finished)
    for name, method in zip(names, ["dense", "expert_threshold", "expert_threshold"], strict=True):
        assert files[name] == finished / method / "best.json"
        assert configs[name].optim.matrix_lr == studies[method]["best"]["options"]["optim.matrix_lr"]
    decays = [vars(configs[name].model.rule)["decay"] for name in names[1:]]
    assert decays == [0.9, 0.0]
    by_flag = configure({"preset": "tiny", "optim.matrix_lr": 0.5}, names, files)
    assert all(config.optim.matrix_lr == 0.5 for config in by_flag.values())


def test_a_comparison_with_options_no_sweep_found_is_refused(finished: Path, refused: Refused, tmp_path: Path) -> None:
    empty, other, damaged = (tmp_path / name for name in ("empty", "other", "damaged"))
    empty.mkdir()
    shutil.copytree(finished / "dense", other / "dense")
    (damaged / "dense").mkdir(parents=True)
    (damaged / "dense" / "best.json").touch()
    for wrong, words in {
        (tmp_path / "none",): "contains no METHOD/best.json",
        (empty,): "contains no METHOD/best.json",
        (finished, other): "also tuned dense",
        (damaged,): "best.json is not a JSON",
        (other,): "no best options were found for expert_threshold",
    }.items():
        tuned = [part for folder in wrong for part in ("--tuned", folder)]
        out = ["--out", tmp_path / "runs" / "out"]
        refused(["compare", "tiny", "--rules", "dense,expert_threshold", *tuned, *out], "--tuned", words)
    both = ["--tuned", finished, "--config", finished / "dense" / "best.json"]
    refused(["compare", "tiny", "--rules", "dense", *both], "leave one of them out")


def test_a_killed_sweep_resumes_with_the_same_trials(search: Experiment, copy: Experiment) -> None:
    """The process is killed in the middle of a journal line of the last trial, or between choosing the first trial and
    starting it. Regression: the latter passed its choice on to the next trial, and shifted all trials by one."""
    import optuna

    journal = copy.out / sweep.STUDIES
    lines = journal.read_bytes().splitlines(keepends=True)
    begun = [place for place, line in enumerate(lines) if json.loads(line)["op_code"] == 4]  # trials created
    for killed in ("in the last trial", "before the first"):
        if killed == "in the last trial":
            journal.write_bytes(b"".join(lines[: begun[-1] + 2]) + lines[begun[-1] + 2][:20])
        else:
            journal.unlink()
            study = optuna.create_study(storage=sweep.open_journal(journal), study_name="dense")
            study.enqueue_trial({"optim.matrix_lr": 0.09})
        with edit(copy.out / "sweep.json") as record:
            record["studies"] = {}
        assert et(*copy.command) == 0
        assert copy.record == search.record, killed


def test_a_diverging_trial_does_not_end_a_sweep(small: Options, tmp_path: Path) -> None:
    out = tmp_path / "out"
    space = ["--space", "optim.matrix_lr=0.02|1e29", "--space", "optim.head_lr=0.004|1e29"]
    options = ["--steps", 12, "--trials", 5, *space, "--methods", "token_choice", "--model.z-loss", 0.001]
    assert et("sweep", *small, *options, "--out", out) == 0
    study = studies_of(out)["token_choice"]
    assert len(study["trials"]) == 5
    diverged = [trial for trial in study["trials"] if trial["state"] == "diverged"]
    assert diverged
    assert all(trial["loss"] is None and "finite" in trial["reason"] for trial in diverged)
    assert study["best"]["options"] == {"optim.matrix_lr": "0.02", "optim.head_lr": "0.004"}
    assert "diverged" in (out / "sweep.html").read_text()


def test_a_trial_that_runs_out_of_memory_is_recorded_and_the_others_continue(small: Options, tmp_path: Path) -> None:
    """Regression: it ended the sweep, and the same command tried it again, so no later trial was ever run."""
    out = tmp_path / "out"
    space = ["--space", "model.d_expert=16|1000000000000", "--trials", 4]  # more bytes than an address space has
    assert "refused: out of memory" in said("sweep", *small, *space, "--out", out)
    found = [(trial["state"], trial["reason"]) for trial in studies_of(out)["expert_threshold"]["trials"]]
    assert set(found) == {("finished", None), ("refused", "out of memory")}
    kept = [int(path.name.removeprefix("trial_")) for path in out.glob("expert_threshold/trial_*")]
    assert all(found[number - 1][0] == "finished" for number in kept)  # none of those refused


def test_a_trial_above_the_median_is_stopped_in_the_middle(small: Options, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--trials", 12, "--methods", "token_choice", "--steps", 8, "--space", "optim.head_lr=1e-4..0.03:log"]
    assert et("sweep", *small, *options, "--out", out) == 0
    trials = studies_of(out)["token_choice"]["trials"]
    pruned = [trial for trial in trials if trial["state"] == "pruned"]
    assert pruned
    assert all(trial["trial"] > sweep.UNPRUNED for trial in pruned)
    for trial in pruned:
        assert trial["loss"] is None
        assert 0.4 * 8 <= trial["curve"][-1][0] < 8


def test_options_tried_before_keep_their_loss(small: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: Options = []
    train = sweep.train

    def counted(folder: RunFolder, *arguments: Any, **options: Any) -> Any:
        trained.append(folder)
        return train(folder, *arguments, **options)

    monkeypatch.setattr(sweep, "train", counted)
    space = ["--methods", "expert_threshold", "--space", "optim.betas=0.9,0.95|0.8,0.95", "--trials", 5]
    assert et("sweep", *small, *space, "--out", tmp_path / "out") == 0
    trials = studies_of(tmp_path / "out")["expert_threshold"]["trials"]
    assert len(trained) == len({trial["options"]["optim.betas"] for trial in trials}) == 2
    assert len(trials) == 5
    for trial in trials:
        first = next(other for other in trials if other["options"] == trial["options"])
        assert (trial["loss"], trial["state"]) == (first["loss"], "finished")
        assert bool(trial["curve"]) == (trial is first)


def test_a_range_has_whole_numbers_for_a_rule_that_takes_no_others() -> None:
    names = ["token_choice", "expert_threshold"]
    configs = configure({"preset": "tiny"}, names)
    space = read_space(["experts_per_token=1..4"], {}, names)
    spaces = [tunable({"preset": "tiny"}, name, configs[name], space).space for name in names]
    searched = [each["rule.experts_per_token"] for each in spaces]
    assert [[entry.value(entry.at(share)) for share in (0.2, 0.9)] for entry in searched] == [[2, 4], [1.6, 3.7]]


RATE = "matrix_lr=0.01..0.1:log"


def recommended(given: Given, space: list[str], best: Given, name: str = "expert_threshold") -> dict[str, Any]:
    """The content of best.json."""
    method = tunable(given, name, configure(given, [name])[name], read_space(space, given, [name]))
    return dict(method.recommend(best))


def test_the_best_options_are_those_that_were_chosen_and_leave_out_what_a_rule_scales() -> None:
    tiny, name, best = {"preset": "tiny"}, "expert_threshold_mean", {"optim.matrix_lr": 0.02}
    rule, optim = {"name": "expert_threshold", "estimator": "mean"}, {"matrix_lr": 0.02}
    assert recommended(tiny, [RATE], best, name) == {"rule": rule, "optim": optim}
    assert recommended({**tiny, "rule.decay": 0.5}, [RATE], best, name)["rule"] == rule | {"decay": 0.5}
    # A warmup beyond the preset's run, for which the best options were once checked.
    longer = {**tiny, "train.steps": 101, "optim.adamw_warmup_steps": 101}
    assert recommended(longer, [RATE], best, name)["optim"] == optim | {"adamw_warmup_steps": 101}
    # Warmups equal to the preset's, which were once left out, so that a run of another length scaled them.
    space = ["optim.adamw_warmup_steps=5|10", "rule.warmup_steps=10|20"]
    best = {"optim.adamw_warmup_steps": 10, "rule.warmup_steps": 20}
    chosen = {"rule": rule | {"warmup_steps": 20}, "optim": {"adamw_warmup_steps": 10}}
    assert recommended({**tiny, "train.steps": 50}, space, best, name) == chosen


def test_an_option_that_was_fixed_stays_fixed_in_a_run_of_another_length(tmp_path: Path) -> None:
    """Regression: the preset has 0.018 at its own length and 0.06 at 250 steps; a rate fixed at 0.018 was lost."""
    (tmp_path / "own.json").write_text('{"optim": {"head_lr": 0.008}}')
    given = {"preset": "quickstart", "optim.matrix_lr": 0.018, "config": str(tmp_path / "own.json")}
    best = recommended(given, ["optim.embed_lr=0.2..0.4:log"], {"optim.embed_lr": 0.3})
    assert best["optim"] == {"matrix_lr": 0.018, "embed_lr": 0.3, "head_lr": 0.008}
    (tmp_path / "best.json").write_text(json.dumps(best))
    assert resolve_run({"config": str(tmp_path / "best.json"), "train.steps": 250}).optim.matrix_lr == 0.018


def test_none_is_the_present_value_of_a_rate_that_follows_the_matrices() -> None:
    given, name = {"preset": "tiny"}, "expert_threshold"
    config = configure(given, [name])[name]
    for searched, present in (("none|0.1", "none"), ("0.01..0.05:log", 0.02), ("0.01|0.02", "0.02")):
        for option in ("optim.router_lr", "optim.expert_lr"):
            method = tunable(given, name, config, read_space([f"{option}={searched}"], given, [name]))
            assert method.present == {option: present}


def test_a_damaged_or_foreign_folder_is_refused(
    copy: Experiment, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_another = ["d4" if argument == "tiny" else argument for argument in copy.command]
    refused(of_another, "preset='d4' differs from 'tiny'")
    journal = copy.out / sweep.STUDIES
    journal.write_bytes(b"{ no JSON\n" + journal.read_bytes())
    refused(copy.command, str(journal), "damaged")
    (copy.out / "sweep.json").write_text("{}")
    refused(copy.command, str(copy.out), "use another --out")
    monkeypatch.setitem(sys.modules, "optuna", None)
    refused(copy.command, install("sweep"))


def test_the_work_ahead_is_announced_before_it_begins(copy: Experiment) -> None:
    lines = said(*copy.command, "--trials", 4).splitlines()
    ahead = next(line for line in lines if " left, up to " in line)
    assert "4 trials × 2 methods, each of 4 steps of 64 tokens; 2 left" in ahead
    trials = [line for line in lines if re.match(r"\w+ 4/4  loss", line)]
    assert len(trials) == 2
    assert lines.index(ahead) < lines.index(trials[0])
    assert all(re.search(r"matrix_lr \S+ .*\d+:\d\d, \d+:\d\d left$", line) for line in trials)
    assert any(line.startswith(f"next: et train tiny --config {copy.out / 'dense' / 'best.json'}") for line in lines)


def test_no_trial_begins_that_would_end_after_the_minutes(small: Options, tmp_path: Path) -> None:
    assert et("sweep", *small, "--minutes", 1e-6, "--methods", "token_choice", "--out", tmp_path / "out") == 0
    (_,) = studies_of(tmp_path / "out")["token_choice"]["trials"]  # the first one shows how long they take


def trial(number: int, loss: float | None, **options: Any) -> Trial:
    return Trial(number, "finished" if loss is not None else "pruned", options, loss, [], 1.0, None, False)


def test_the_best_trial_is_the_first_of_the_least_loss() -> None:
    assert best_of([trial(1, None), trial(2, 3.0), trial(3, 2.0), trial(4, 2.0)]) == trial(3, 2.0)
    assert best_of([trial(1, None)]) is None


def test_the_page_has_a_row_and_figures_for_each_method(copy: Experiment, drawn: None) -> None:
    printed = said(*copy.command)
    page = (copy.out / "sweep.html").read_text()
    table = page[page.index("<tbody>") : page.index("</tbody>")]
    assert list(dict.fromkeys(re.findall(r"<tr><td>(\w+)</td>", table))) == METHODS
    assert all(f"<h2>{method}</h2>" in page for method in METHODS)
    assert page.count("Chart: Loss over each option") == len(METHODS)
    assert "nan" not in table.lower()
    for study in studies_of(copy.out).values():
        assert f"{study['best']['loss']:.4f}" in printed


def test_every_finished_trial_is_drawn_and_choices_that_are_numbers_stand_in_their_order(drawn: None) -> None:
    """Regression: trials above the axis were left out, and 16 came before 4."""
    from expert_threshold.compare.sweep_page import draw_options

    losses = {"4": 3.0, "16": 3.01, "8": 9.0}
    trials = [trial(n, loss, d=d)._asdict() for n, (d, loss) in enumerate(losses.items())]
    options = {"d": {"space": "4|16|8", "scale": None, "best": "4"}}
    figure = draw_options({"options": options, "trials": trials, "best": trials[0]})
    (axes,) = [axes for axes in figure.axes if axes.get_title() == "d"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "8", "16"]
    top = axes.get_ylim()[1]
    dots = {float(line.get_xdata()[0]): (line.get_marker(), float(line.get_ydata()[0])) for line in axes.lines[:3]}
    assert dots == {0.0: ("o", 3.0), 2.0: ("o", 3.01), 1.0: ("^", top)}

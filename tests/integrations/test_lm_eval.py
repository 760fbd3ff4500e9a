"""The model class of lm-evaluation-harness, against plain forwards, and local tasks through `et evaluate --harness`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import write_run
from commands import Refused, lines, write_lines
from expert_threshold.cli import main
from expert_threshold.data import Tokenizer
from expert_threshold.generate import generate
from expert_threshold.install import install
from expert_threshold.integrations.export import export_run
from expert_threshold.model import GPT
from expert_threshold.model.score import TOKENS_AT_ONCE

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install -e '.[eval]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the harness's many packages are not ours

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from expert_threshold.integrations.lm_eval import HarnessModel, RunModel, read_request  # noqa: E402

CONTEXT = 64  # of the small model
PROMPTS = ["the cat", "the hat of the cat; the hat of the cat", "", "on the mat; the cat sat"]


@pytest.fixture
def lm(model: GPT, tokenizer: Tokenizer) -> HarnessModel:
    return HarnessModel(model, tokenizer)


def requests(kind: Any, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def scored(model: GPT, ids: list[int], count: int) -> tuple[float, bool]:
    """The log-probability of the last `count` tokens by one plain forward, and whether each is the likeliest."""
    with torch.no_grad():
        found = model(torch.tensor([ids[:-1]])).logits[0, -count:].log_softmax(-1)
    wanted = torch.tensor(ids[-count:])
    return float(found.gather(1, wanted[:, None]).sum()), bool((found.argmax(1) == wanted).all())


def test_log_likelihoods_are_those_of_plain_forwards(lm: HarnessModel, model: GPT, tokenizer: Tokenizer) -> None:
    pairs = [(context, ending) for context in PROMPTS for ending in ("the mat", "cat sat on", "x")]
    pairs += [("the cat sat " * 30, "the hat"), ("the hat ", "of the cat")]
    for (context, ending), (found, greedy) in zip(
        pairs, lm.loglikelihood(requests("loglikelihood", pairs)), strict=True
    ):
        given = [tokenizer.bos, *tokenizer.encode(context.rstrip())]
        ids = [tokenizer.bos, *tokenizer.encode(context + ending)]
        expected, likeliest = scored(model, ids[-(CONTEXT + 1) :], len(ids) - len(given))
        assert found == pytest.approx(expected, abs=1e-4)
        assert greedy == likeliest


def test_of_a_too_long_continuation_the_end_is_scored(lm: HarnessModel, caplog: pytest.LogCaptureFixture) -> None:
    ((found, _),) = lm.loglikelihood(requests("loglikelihood", [("a", " the cat sat" * 60)]))
    assert found < 0
    assert f"with a context of {CONTEXT} tokens, only the ends of 1 continuations are scored" in caplog.text


def test_a_whole_text_is_scored_in_windows_each_token_once(lm: HarnessModel, model: GPT, tokenizer: Tokenizer) -> None:
    texts = [("the cat sat on the mat; " * 20,), ("a",), ("",)]
    found = lm.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    for (text,), nats in zip(texts, found, strict=True):
        ids = [tokenizer.bos, *tokenizer.encode(text)]
        expected = 0.0
        for start in range(1, len(ids), CONTEXT):
            end = min(start + CONTEXT, len(ids))
            first = start - 1 if end - start == CONTEXT else max(end - CONTEXT - 1, 0)  # the last window is full, too
            expected += scored(model, ids[first:end], end - start)[0]
        assert nats == pytest.approx(expected, abs=1e-3)
    assert found[2] == 0


def until(prompts: list[str], **options: Any) -> list[Instance]:
    return requests("generate_until", [(prompt, {"until": [], "max_gen_toks": 20} | options) for prompt in prompts])


def alone(model: GPT, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    return "".join(step.text for step in generate(model, tokenizer, prompt, max_tokens=count, temperature=0))


def test_texts_written_together_are_those_written_alone(lm: HarnessModel, model: GPT, tokenizer: Tokenizer) -> None:
    expected = [alone(model, tokenizer, prompt, 20) for prompt in PROMPTS]
    assert len(set(expected)) == len(PROMPTS)
    assert lm.generate_until(until(PROMPTS)) == expected
    assert lm.generate_until(until(PROMPTS, do_sample=False, temperature=0.7, top_p=0.9)) == expected
    lm.tokens_at_once = 1
    assert lm.generate_until(until(PROMPTS)) == expected


def test_writing_ends_before_a_stop_sequence(lm: HarnessModel, model: GPT, tokenizer: Tokenizer) -> None:
    text = alone(model, tokenizer, PROMPTS[1], 20)
    stop = text[5:8]
    assert lm.generate_until(until(PROMPTS[1:2], until=["never", stop])) == [text[: text.index(stop)]]
    assert lm.generate_until(until(PROMPTS[1:2], until=stop)) == [text[: text.index(stop)]]


def test_a_long_prompt_is_cropped_from_the_left_and_generation_gets_half_of_the_context(
    lm: HarnessModel, model: GPT, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = "the cat sat on the mat; " * 20
    (text,) = lm.generate_until(until([prompt], max_gen_toks=1000))
    ids = tokenizer.encode(prompt)[-CONTEXT // 2 :]
    steps = generate(model, tokenizer, ids, max_tokens=CONTEXT // 2, temperature=0)
    assert text == "".join(step.text for step in steps)
    assert "max_gen_toks=1000 was reduced to half of the context of 64" in caplog.text


def test_sampling_differs_between_requests_and_repeats_between_calls(lm: HarnessModel) -> None:
    twice = until(["the cat"] * 2, do_sample=True, temperature=1.0, top_k=20)
    one, other = lm.generate_until(twice)
    assert one != other
    assert lm.generate_until(twice) == [one, other]


@pytest.mark.parametrize("options", [{"do_sample": True, "top_p": 0.9}, {"num_beams": 4}])
def test_an_unknown_way_to_sample_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{list(options)[-1]}=.* is not supported here"):
        read_request(options, CONTEXT)


def test_a_run_is_a_model_by_its_name(model: GPT, tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_run(tmp_path / "run", model)
    for batch_size, most, tokens in (
        ("auto:4", None, TOKENS_AT_ONCE),
        ("auto", 2, 2 * CONTEXT),
        (3, None, 3 * CONTEXT),
    ):
        options = {"batch_size": batch_size, "max_batch_size": most, "device": "cpu"}
        lm = RunModel.create_from_arg_string(f"run={tmp_path / 'run'}", options)
        assert lm.tokens_at_once == tokens
    pair = requests("loglikelihood", [("the cat", " sat")])
    ((found, _),) = lm.loglikelihood(pair)
    assert found == pytest.approx(HarnessModel(model, tokenizer).loglikelihood(pair)[0][0], abs=1e-5)


# Local tasks.

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: "{data}"}}
  cache_dir: "{cache}"
test_split: test
doc_to_text: "{{{{question}}}}"
"""
TASKS = {
    "colours": """\
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}]
""",
    "writing": """\
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["never"], max_gen_toks: 5}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture
def tasks(tmp_path: Path, model: GPT, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tasks of ten questions, of which the model answers some; all that it has to write is right but one."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = []
    for i in range(10):
        question = f"the cat {i}"
        answer = alone(model, tokenizer, question, 5) if i else "something else"
        rows.append({"question": question, "choices": ["sat on", "the mat"], "gold": i % 2, "answer": answer})
    data = write_lines(folder / "rows.jsonl", rows)

    def ours(include_path: str, **_: Any) -> TaskManager:  # reading the harness's own tasks takes seconds
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr("expert_threshold.integrations.lm_eval.TaskManager", ours)
    monkeypatch.chdir(tmp_path)
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data, cache=tmp_path / "cache") + text)
    return folder


def test_local_tasks_are_asked_and_their_scores_shown_and_written(
    tasks: Path, tmp_path: Path, model: GPT, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", model).path
    options = ["--no-validation", "--harness", "colours,writing", "--harness-path", str(tasks), "--dtype", "float32"]
    assert main(["evaluate", str(run), *options]) == 0
    right = 0
    for row in lines(tasks / "rows.jsonl"):
        given = tokenizer.encode(row["question"])
        texts = [tokenizer.encode(f"{row['question']} {choice}") for choice in row["choices"]]
        sums = [scored(model, [tokenizer.bos, *ids], len(ids) - len(given))[0] for ids in texts]
        right += sums.index(max(sums)) == row["gold"]
    assert 0 < right < 10
    saved = json.loads((run / "evaluation.json").read_text())["harness"]
    assert saved["colours"]["acc"]["value"] == right / 10
    assert saved["writing"]["exact_match"]["value"] == 0.9
    printed = capsys.readouterr()
    assert f"{right / 10:.4f} ± {saved['colours']['acc']['stderr']:.4f}" in printed.out
    assert "colours: done" in printed.err
    assert main(["evaluate", str(run), *options, "--max-per-task", "4", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["harness"]["writing"]["exact_match"]["value"] == 0.75


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["colour", "--harness-path", "tasks"], "--harness: unknown task colour; did you mean colours?"),
        (["colours", "--harness-path", "nowhere"], "--harness-path nowhere is not a folder"),
        (["writing", "--harness-path", "tasks"], "--harness writing: its questions cannot be loaded"),
    ],
)
def test_what_cannot_be_asked_is_one_line_and_2(
    options: list[str], message: str, tasks: Path, model: GPT, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tasks.with_name("run"), model).path
    writing = (tasks / "writing.yaml").read_text()
    (tasks / "writing.yaml").write_text(writing.replace("rows.jsonl", "gone.jsonl"))
    assert main(["evaluate", "run", "--no-validation", "--harness", *options]) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]
    assert not (run / "evaluation.json").exists() or "writing" in options


def test_a_missing_harness_is_reported_with_the_command_to_install_it(
    tmp_path: Path, model: GPT, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    write_run(tmp_path / "run", model)
    monkeypatch.delitem(sys.modules, "expert_threshold.integrations.lm_eval")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    refused(["evaluate", tmp_path / "run", "--harness", "colours"], install("eval"))


# The harness's own client of OpenAI's completions, against the server.

PAIRS = [
    (context, ending)
    for context in ("the cat", "on the mat; the hat", "a")
    for ending in (" sat", " on the mat", " cät", "; the hat of")
]


@pytest.fixture(scope="module")
def client(model: GPT, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Follows docs/serving.md."""
    for name in ("aiohttp", "requests", "tenacity", "tqdm", "transformers", "uvicorn"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'lm-eval[api]' -e '.[hf,serve]'")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from served import served

    folder = tmp_path_factory.mktemp("run")
    export_run(write_run(folder / "run", model).path, folder / "exported")
    with served(model) as server:
        yield LocalCompletionsAPI(
            model="small",
            base_url=f"{server.url}/v1/completions",
            tokenizer=str(folder / "exported"),
            tokenizer_backend="huggingface",
            max_length=CONTEXT,
            batch_size=4,
            max_retries=1,
            add_bos_token=True,
        )


def test_over_http_log_likelihoods_are_those_of_our_model_class(client: Any, model: GPT, tokenizer: Tokenizer) -> None:
    likeliest = [
        (context, step.text)
        for context in ("the cat", "sat on", "of the", "hat; the", "mat", "the hat of")
        for step in generate(model, tokenizer, context, max_tokens=1, temperature=0)
        if tokenizer.encode(context + step.text) == [*tokenizer.encode(context), step.token]
    ]
    assert likeliest
    pairs = [*PAIRS, *likeliest, ("", "the cat"), ("", " sat on")]
    expected = HarnessModel(model, tokenizer).loglikelihood(requests("loglikelihood", pairs))
    found = client.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in found} == {False, True}
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in expected], abs=1e-3)


def test_over_http_whole_texts_have_the_scores_of_our_model_class_as_the_client_opens_them_itself(
    client: Any, model: GPT, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: by the documented route the token that opens a text was scored, or sent as characters."""
    longest = tokenizer.decode(tokenizer.encode("the cat sat on the mat; " * 9)[: CONTEXT - 2])
    texts = requests("loglikelihood_rolling", [("the hat of the cat",), ("",), (longest,)])
    expected = HarnessModel(model, tokenizer).loglikelihood_rolling(texts)
    monkeypatch.setattr(client, "add_bos_token", False)
    assert client.loglikelihood_rolling(texts, disable_tqdm=True) == pytest.approx(expected, abs=1e-3)


def test_over_http_texts_are_those_of_our_model_class(client: Any, model: GPT, tokenizer: Tokenizer) -> None:
    asked = requests(
        "generate_until",
        [(context, {"until": ["t"], "max_gen_toks": 9, "temperature": 0}) for context, _ in PAIRS[::4]],
    )
    assert client.generate_until(asked, disable_tqdm=True) == HarnessModel(model, tokenizer).generate_until(asked)

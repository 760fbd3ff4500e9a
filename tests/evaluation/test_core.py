"""CORE: prompts and boundaries worked by hand, answers in batches, and choosers whose score is known."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import RULES, small_model
from commands import write_lines
from expert_threshold.data import Tokenizer
from expert_threshold.evaluation import Answer, ModelScorer, Question, Task, centred, evaluate_task, read_bundle
from expert_threshold.evaluation.core import ask, choose_rows, continuations, is_right
from expert_threshold.model import GPT
from expert_threshold.routing import Rule

REAL = Path(__file__).parents[3] / "shared" / "data" / "core"

CORE_YAML = """\
# A bundle of three tasks.
icl_tasks:
-
  label: colours
  dataset_uri: a/colours.jsonl
  num_fewshot: [1]
  icl_task_type: multiple_choice
  continuation_delimiter: "\\nAnswer: "
- {label: who, dataset_uri: who.jsonl, num_fewshot: [0], icl_task_type: schema}
- {label: capitals, dataset_uri: capitals.jsonl, num_fewshot: [2], icl_task_type: language_modeling}
"""
COLOURS = [
    {"query": "Question: sky?", "choices": ["blue", "red"], "gold": 0},
    {"query": "Question: grass?", "choices": ["black", "green"], "gold": 1},
    {"query": "Question: blood?", "choices": ["grey", "red"], "gold": 1},
]
SAW = [f"The cat saw the dog; the {who}" for who in ("cat", "dog")]
WHO = [{"context_options": SAW, "continuation": "ran.", "gold": 1}]
CITIES = {"France": "Paris europe", "Peru": "Lima america", "Chile": "Santiago america", "Italy": "Rome europe"}
CAPITALS = [
    {"context": f"The capital of {country} is  ", "continuation": city.split()[0], "category": city.split()[1]}
    for country, city in CITIES.items()
]
BASELINES = "Eval Task,#shots,Random baseline\ncolours,1,50\nwho,0,50\ncapitals,2,0\nunused,0,12.5\n"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "bundle"
    (path / "eval_data" / "a").mkdir(parents=True)
    (path / "core.yaml").write_text(CORE_YAML)
    (path / "eval_meta_data.csv").write_text(BASELINES)
    for name, rows in {"a/colours": COLOURS, "who": WHO, "capitals": CAPITALS}.items():
        write_lines(path / "eval_data" / f"{name}.jsonl", rows)
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    text = "the capital of Peru is Lima; the cat saw the dog; Question: sky? Answer: blue red"
    return Tokenizer.train([text] * 4, 290)


def task(kind: Any, rows: Sequence[dict[str, Any]], shots: int = 0, delimiter: str = " ") -> Task:
    return Task("test", kind, shots, delimiter, 0.0, rows, "")


def test_a_bundle_is_read(bundle: Path) -> None:
    colours, who, capitals = read_bundle(bundle)
    assert colours[:5] == ("colours", "multiple_choice", 1, "\nAnswer: ", 0.5)
    assert who[:5] == ("who", "schema", 0, " ", 0.5)
    assert capitals[:5] == ("capitals", "language_modeling", 2, " ", 0.0)
    assert (colours.rows, who.rows, capitals.rows) == (COLOURS, WHO, CAPITALS)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("core.yaml", None, "core.yaml is missing"),
        ("eval_data/who.jsonl", None, r"who.jsonl is missing"),
        ("core.yaml", "", "core.yaml is damaged"),
        ("core.yaml", "tasks:\n- label: x\n", "core.yaml is damaged .it contains no 'icl_tasks'"),
        ("core.yaml", "icl_tasks:\n- label: {x: y\n  a:b\n", "core.yaml is damaged"),
        ("core.yaml", CORE_YAML.replace("[2]", "[2, 3]"), "core.yaml is damaged"),
        ("core.yaml", CORE_YAML.replace("schema", "oral"), "core.yaml is damaged .a field of who "),
        ("eval_meta_data.csv", BASELINES.replace("who", "whom"), "eval_meta_data.csv is damaged .it contains no 'who'"),
        ("eval_meta_data.csv", BASELINES.replace("who,0,50", "who,0,x"), "eval_meta_data.csv is damaged"),
        ("eval_meta_data.csv", BASELINES.replace("who,0,50", "who,0,nan"), "who is nan percent"),
        ("eval_meta_data.csv", BASELINES + "x" * 131_073, "eval_meta_data.csv is damaged"),
        ("core.yaml", CORE_YAML.replace("label: who", "label: [1]"), "core.yaml is damaged"),
        ("eval_data/who.jsonl", json.dumps(WHO[0] | {"category": ["x"]}), "line 1 is not a schema question"),
        ("eval_data/who.jsonl", "", "who.jsonl is empty"),
        ("eval_data/who.jsonl", '{"context_op', "line 1 is not a schema question"),
        ("eval_data/who.jsonl", json.dumps(WHO[0] | {"gold": 2}), "line 1 is not a schema question"),
        ("eval_data/who.jsonl", json.dumps(WHO[0]) + "\n" + json.dumps(CAPITALS[0]), "line 2 is not a schema question"),
        ("eval_data/capitals.jsonl", '{"context": "a", "continuation": 1}', "line 1 is not a "),
        ("eval_data/a/colours.jsonl", '{"query": "a", "choices": "yes", "gold": 0}', "line 1 is not a "),
    ],
)
def test_a_damaged_bundle_is_refused(bundle: Path, file: str, content: str | None, message: str) -> None:
    if content is None:
        (bundle / file).unlink()
    else:
        (bundle / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_bundle(bundle)


def test_multiple_choice_prompts_have_one_solved_example_of_another_row(bundle: Path) -> None:
    colours, _, _ = read_bundle(bundle)
    # random.Random(1234 + 1).sample([0, 2], 1) is [2]; of the three rows, the second is asked.
    assert random.Random(1235).sample([0, 2], 1) == [2]
    question = ask(colours, COLOURS, 1)
    solved = "Question: blood?\nAnswer: red\n\nQuestion: grass?\nAnswer: "
    assert question == Question("multiple_choice", (solved + "black", solved + "green"), 1, None)


def test_schema_prompts_differ_in_context_and_language_modelling_prompts_are_trimmed(bundle: Path) -> None:
    _, who, capitals = read_bundle(bundle)
    prompts = ("The cat saw the dog; the cat ran.", "The cat saw the dog; the dog ran.")
    assert ask(who, WHO, 0) == Question("schema", prompts, 1, None)
    assert random.Random(1234).sample([1, 2, 3], 2) == [2, 1]
    solved = "The capital of Chile is Santiago\n\nThe capital of Peru is Lima\n\nThe capital of France is"
    assert ask(capitals, CAPITALS, 0) == Question("language_modeling", (solved, solved + " Paris"), 0, "europe")


def test_solved_examples_are_drawn_as_from_the_list_of_the_other_rows() -> None:
    rows = [{"query": str(i), "choices": ["y"], "gold": 0} for i in range(200)]
    for index in (0, 1, 57, 199):
        others = [row for i, row in enumerate(rows) if i != index]
        drawn = random.Random(1234 + index).sample(others, 10)
        expected = "".join(f"{row['query']} y\n\n" for row in drawn) + f"{index} y"
        assert ask(task("multiple_choice", rows, 10), rows, index).prompts == (expected,)


def test_a_subset_is_the_beginning_of_the_shuffled_rows_and_examples_come_from_it() -> None:
    rows = [{"query": str(i), "choices": ["y"], "gold": 0} for i in range(50)]
    shuffled = list(rows)
    random.Random(1337).shuffle(shuffled)
    asked = task("multiple_choice", rows, 4)
    assert choose_rows(asked, None) == shuffled
    assert choose_rows(asked, 5) == shuffled[:5]
    with pytest.raises(ValueError, match=r"max_per_task=4: test shows 4 solved examples.*at least 5"):
        choose_rows(asked, 4)


def test_scoring_starts_where_choices_diverge_contexts_end_or_the_answer_begins() -> None:
    assert continuations("multiple_choice", [[9, 1, 2, 3], [9, 1, 4]]) == [([9, 1, 2, 3], 2), ([9, 1, 4], 2)]
    assert continuations("schema", [[9, 1, 2, 3, 4], [9, 5, 3, 4]]) == [([9, 1, 2, 3, 4], 3), ([9, 5, 3, 4], 2)]
    assert continuations("language_modeling", [[9, 1], [9, 1, 2, 3]]) == [([9, 1, 2, 3], 2)]


def test_the_first_of_the_lowest_penalties_is_the_answer() -> None:
    def answered(gold: int, *penalties: float) -> bool:
        return is_right(Question("multiple_choice", ("a", "b", "c"), gold, None), Answer(penalties))

    assert answered(1, 2.0, 1.0, 1.0)
    assert not answered(2, 2.0, 1.0, 1.0)
    assert answered(0, math.nan, 1.0, 0.0)
    assert answered(2, 1.0, math.nan, 0.0)
    text = Question("language_modeling", ("a", "a b"), 0, None)
    assert is_right(text, Answer([0]))
    assert not is_right(text, Answer([1]))
    assert not is_right(text, Answer([math.nan]))
    assert [centred(*pair) for pair in ((0.25, 0.25), (1.0, 0.62), (0.0, 0.5))] == [0, 1, -1]


# A model with random weights, on questions of every kind.

KINDS = "multiple_choice", "schema", "language_modeling"


def make_model(tokenizer: Tokenizer, rule: Rule | None, context: int = 256) -> GPT:
    return small_model(rule, steps=0, vocab_size=tokenizer.vocab_size, context=context, layers=2)


def make_questions(kind: Any) -> list[Question]:
    chance = random.Random(0)

    def text(most: int = 6, least: int = 1) -> str:
        words = ["the", "capital", "of", "Peru", "is", "a", "cat", "that", "saw"]
        return " ".join(chance.choices(words, k=chance.randint(least, most)))

    def row() -> dict[str, Any]:
        lists = {"choices": [text() for _ in range(3)], "context_options": [text() for _ in range(2)]}
        return lists | {"query": text(5, 5), "context": text(), "continuation": text(3, 3), "gold": 1}

    rows = [row() for _ in range(9)]
    asked = task(kind, rows, 2)
    return [ask(asked, rows, index) for index in range(len(rows))]


@pytest.mark.parametrize("kind", KINDS)
def test_penalties_are_those_of_one_plain_forward_per_prompt(tokenizer: Tokenizer, kind: Any) -> None:
    model = make_model(tokenizer, RULES["expert_threshold"], context=40)
    cropped, questions = 0, make_questions(kind)
    for question, answer in zip(questions, ModelScorer(model, tokenizer)(questions), strict=True):
        sequences = [[tokenizer.bos, *tokenizer.encode(prompt)] for prompt in question.prompts]
        scored = continuations(kind, sequences)
        cropped += answer.cropped
        assert answer.cropped == sum(len(c.tokens) > 40 for c in scored)
        for (tokens, start), penalty in zip(scored, answer.penalties, strict=True):
            count = len(tokens) - start
            ids = torch.tensor(tokens[-40:])
            with torch.no_grad():
                logits = model(ids[None]).logits[0, -count - 1 : -1]
            if kind == "language_modeling":
                assert penalty == (logits.argmax(1) != ids[-count:]).sum()
            else:
                expected = torch.nn.functional.cross_entropy(logits, ids[-count:])
                assert penalty == pytest.approx(float(expected), abs=1e-4)
    assert cropped


def test_a_continuation_that_the_context_cannot_hold_is_counted(tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer, None, context=8)
    (answer,) = ModelScorer(model, tokenizer)([Question("multiple_choice", ("a b", "a " + "c d " * 20), 0, None)])
    assert (answer.cropped, answer.cut) == (1, 1)
    assert all(map(math.isfinite, answer.penalties))


def test_a_task_counts_its_rows_its_sequences_and_its_categories(bundle: Path) -> None:
    *_, capitals = read_bundle(bundle)

    def knows_america(questions: Sequence[Question]) -> list[Answer]:
        return [Answer([0 if question.category == "america" else 2], cropped=1) for question in questions]

    told: list[tuple[int, int]] = []
    result = evaluate_task(capitals, knows_america, progress=lambda *at: told.append(at))
    assert (result.rows, result.accuracy, result.sequences, result.cropped, result.cut) == (4, 0.5, 4, 4, 0)
    assert result.categories == {"america": 1.0, "europe": 0.0}
    assert told == [(4, 4)]


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no CORE bundle at {REAL}")
def test_the_real_bundle_has_22_tasks_and_80995_rows() -> None:
    tasks = read_bundle(REAL)
    assert len(tasks) == 22
    assert sum(len(rows) for rows in {task.hash: task.rows for task in tasks}.values()) == 80_995

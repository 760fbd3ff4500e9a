"""Evaluates CORE, the 22 tasks of DCLM (arXiv 2406.11794), in the same way as nanochat."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..data import Tokenizer
from ..model import GPT, Continuation, common_prefix, crop, score
from .bundle import Task, TaskKind, TaskRow

QUESTIONS_AT_ONCE = 64


class Question(NamedTuple):
    """A question's prompts: one per answer or, in language modelling, one without the answer and one with it."""

    kind: TaskKind
    prompts: tuple[str, ...]
    gold: int  # index of the prompt with the right answer; unused for language modelling
    category: str | None


class Answer(NamedTuple):
    """The answer to a question: the prompt with the lowest penalty. In language modelling, there is a single penalty,
    which is 0 if the answer is right.

    cropped: number of sequences longer than the context. cut: how many of them lost tokens of the continuation.
    """

    penalties: Sequence[float]
    cropped: int = 0
    cut: int = 0


Scorer = Callable[[Sequence[Question]], list[Answer]]
"""Answers several questions of one task."""


@dataclass(frozen=True)
class TaskResult:
    """The accuracy on `rows` questions, overall and for each of their categories, if they have any."""

    rows: int
    accuracy: float
    sequences: int
    cropped: int
    cut: int
    categories: dict[str, float]


def evaluate_task(
    task: Task,
    scorer: Scorer,
    *,
    max_rows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TaskResult:
    """Evaluate a model on all questions of a task, or on only `max_rows` of them.

    progress: called with the number of questions answered and the total. Raises ValueError if there are too few rows to
    draw solved examples from.
    """
    rows = choose_rows(task, max_rows)
    right: dict[str | None, list[bool]] = defaultdict(list)
    sequences = cropped = cut = 0
    for start in range(0, len(rows), QUESTIONS_AT_ONCE):
        end = min(start + QUESTIONS_AT_ONCE, len(rows))
        questions = [ask(task, rows, index) for index in range(start, end)]
        for question, answer in zip(questions, scorer(questions), strict=True):
            right[question.category].append(is_right(question, answer))
            sequences += len(answer.penalties)
            cropped += answer.cropped
            cut += answer.cut
        if progress is not None:
            progress(end, len(rows))
    accuracy = sum(map(sum, right.values())) / len(rows)
    categories = {name: sum(hits) / len(hits) for name, hits in right.items() if name is not None}
    return TaskResult(len(rows), accuracy, sequences, cropped, cut, categories)


def centred(accuracy: float, baseline: float) -> float:
    """Return the centred accuracy: 0 at chance, 1 if every answer is right."""
    return (accuracy - baseline) / (1 - baseline)


def choose_rows(task: Task, max_rows: int | None) -> list[TaskRow]:
    """Return the task's rows in nanochat's random order, at most `max_rows` of them."""
    rows = list(task.rows)
    random.Random(1337).shuffle(rows)
    rows = rows[:max_rows]
    if len(rows) <= task.shots:
        shows = f"{task.label} shows {task.shots} solved examples, drawn from the other rows"
        if max_rows is None or max_rows >= len(task.rows):
            raise ValueError(f"{shows}, but has only {len(rows)} rows; omit the task, or download the bundle again")
        raise ValueError(f"max_per_task={max_rows}: {shows}; use at least {task.shots + 1}")
    return rows


def ask(task: Task, rows: Sequence[TaskRow], index: int) -> Question:
    """Return the question of row `index`, preceded by solved examples from other rows."""
    row = rows[index]
    # Drawing indices into the other rows is equivalent to drawing from a list of those rows.
    drawn = random.Random(1234 + index).sample(range(len(rows) - 1), task.shots)
    solved = [rows[other + (other >= index)] for other in drawn]
    right = [-1 if task.kind == "language_modeling" else row["gold"] for row in solved]
    shots = "".join(f"{_prompts(task, row)[i]}\n\n" for row, i in zip(solved, right, strict=True))
    prompts = [shots + prompt for prompt in _prompts(task, row)]
    if task.kind == "language_modeling":
        prompts[0] = prompts[0].strip()
    return Question(task.kind, tuple(prompts), row.get("gold", 0), row.get("category"))


def _prompts(task: Task, row: TaskRow) -> list[str]:
    if task.kind == "multiple_choice":
        return [row["query"] + task.delimiter + choice for choice in row["choices"]]
    if task.kind == "schema":
        return [context + task.delimiter + row["continuation"] for context in row["context_options"]]
    given = row["context"].strip() + task.delimiter
    return [given, given + row["continuation"]]


def is_right(question: Question, answer: Answer) -> bool:
    if question.kind == "language_modeling":
        return list(answer.penalties) == [0]
    # The first of the lowest penalties wins. As in nanochat, the NaN of an empty continuation wins only if it is first.
    return min(range(len(answer.penalties)), key=answer.penalties.__getitem__) == question.gold


def continuations(kind: TaskKind, sequences: Sequence[list[int]]) -> list[Continuation]:
    """Return the continuations in a question's sequences. Only their tokens are scored.

    In multiple choice, a continuation is what follows the common prefix; in schema, it is the common suffix. In
    language modelling, it is what the sequence with the answer adds to the one without.
    """
    if kind == "schema":
        shared = common_prefix([tokens[::-1] for tokens in sequences])
        return [Continuation(tokens, len(tokens) - shared) for tokens in sequences]
    shared = common_prefix(sequences)
    return [Continuation(tokens, shared) for tokens in (sequences[1:] if kind == "language_modeling" else sequences)]


@dataclass(frozen=True)
class ModelScorer:
    """Answers questions. The penalty is the model's mean loss on a continuation, in nats per token, or, in language
    modelling, the number of tokens that greedy decoding gets wrong. Routing is causal, and the model's mode is kept.
    """

    model: GPT
    tokenizer: Tokenizer

    def __call__(self, questions: Sequence[Question]) -> list[Answer]:
        texts = [prompt for question in questions for prompt in question.prompts]
        encoded = iter(self.tokenizer.encode_batch(texts))
        context = self.model.config.context
        whole = [continuations(q.kind, [[self.tokenizer.bos, *next(encoded)] for _ in q.prompts]) for q in questions]
        exact = questions[0].kind == "language_modeling"
        cropped = [[crop(continuation, context) for continuation in group] for group in whole]
        scores = score(self.model, cropped, misses=exact)
        return [
            Answer(
                # NaN if no token is scored.
                [math.nan if not s.tokens else s.misses if exact else s.nats / s.tokens for s in found],
                cropped=sum(len(c.tokens) > context for c in group),
                cut=sum(len(c.tokens) - max(c.start, 1) > context - 1 for c in group),
            )
            for found, group in zip(scores, whole, strict=True)
        ]

"""Answering questions of CORE's shapes in batches, against one prompt at a time, in one run.

    python benchmarks/evaluation.py [--json] [--preset quickstart] [--context 1024] [--questions 64]

`one_ms` is the time of a question with a forward for every prompt, `batched_ms` with prompts of like length together,
`ours_ms` with what the prompts of a question begin with computed once as well. `ratio` is the median over interleaved
repetitions of the first over the last, `ratio_batched` of the first over the second. Prompts are of random words, about
as long as those of the task that the line names. Answers are compared: in float32 they are equal to 1e-4. Weights are
random and cutoffs settled, so that loads are near their target.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from common import compute_dtype, machine, positive, time_interleaved
from decode import settled_model

from expert_threshold.data import Tokenizer
from expert_threshold.evaluation import Answer, ModelScorer, Question, Task
from expert_threshold.evaluation.core import ask
from expert_threshold.model import GPT, GPTConfig

NEVER = 10**9
WORDS = "a and answer by city for from has in is it man not of on one river that the then they to was water".split()  # noqa: SIM905


class Shape(NamedTuple):
    """Words in a question, and in each of the `choices` answers to it."""

    kind: Any
    shots: int
    question: int
    choices: int
    answer: int


SHAPES = {
    "hellaswag_zeroshot": Shape("multiple_choice", 0, 40, 4, 25),
    "arc_easy": Shape("multiple_choice", 10, 25, 4, 5),
    "winogrande": Shape("schema", 0, 15, 2, 8),
    "jeopardy": Shape("language_modeling", 10, 20, 1, 2),
}


def make_questions(shape: Shape, count: int) -> list[Question]:
    chance = random.Random(0)

    def text(words: int) -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(words // 2 + 1, words * 3 // 2)))

    rows = [
        {
            "query": (question := text(shape.question)),
            "choices": [text(shape.answer) for _ in range(shape.choices)],
            "context_options": [f"{question} {name}" for name in ("one", "another")],
            "context": question,
            "continuation": text(shape.answer),
            "gold": 0,
        }
        for _ in range(count + shape.shots)
    ]
    task = Task("random", shape.kind, shape.shots, " ", 0.0, rows, "")
    return [ask(task, rows, index) for index in range(count)]


def measure(name: str, tokenizer: Tokenizer, model: GPT, count: int, repeats: int) -> dict[str, Any]:
    shape = SHAPES[name]
    questions = make_questions(shape, count)
    alone = ModelScorer(model, tokenizer, tokens_at_once=1, shared_prefix=NEVER)
    batched = ModelScorer(model, tokenizer, shared_prefix=NEVER)
    ours = ModelScorer(model, tokenizer)
    ways: dict[str, Callable[[], list[Answer]]] = {
        "one": lambda: [answer for question in questions for answer in alone([question])],
        "batched": lambda: batched(questions),
        "ours": lambda: ours(questions),
    }
    answers = {way: torch.tensor([answer.penalties for answer in call()]) for way, call in ways.items()}
    difference = max(float((answers["one"] - answers[way]).abs().max()) for way in ("batched", "ours"))
    assert model.compute_dtype != torch.float32 or difference < 1e-4
    times = time_interleaved(ways, repeats, warmup=1)
    prompts = [prompt for question in questions for prompt in question.prompts[shape.kind == "language_modeling" :]]
    tokens = sum(map(len, tokenizer.encode_batch(prompts))) + len(prompts)

    def ratio(way: str) -> float:
        return round(statistics.median(a / b for a, b in zip(times["one"], times[way], strict=True)), 2)

    return {
        "task": name,
        "kind": shape.kind,
        "questions": count,
        "prompts": len(prompts),
        "tokens_per_prompt": round(tokens / len(prompts), 1),
        "ratio": ratio("ours"),
        "ratio_batched": ratio("batched"),
        "largest_difference": difference,
        "tokens_per_second": round(tokens / statistics.median(times["ours"])),
        **{f"{way}_ms": round(1e3 * statistics.median(each) / count, 3) for way, each in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="quickstart")
    parser.add_argument("--context", type=positive, default=1024)
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--json", action="store_true", help="one flat JSON object a line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.train([" ".join(WORDS)] * 2, 300)
    vocab_size = GPTConfig.preset(args.preset).vocab_size
    model = settled_model(args.preset, vocab_size, compute_dtype(args.dtype), context=args.context)
    for name in SHAPES:
        row = measure(name, tokenizer, model, args.questions, args.repeats)
        row |= {
            "preset": args.preset,
            "context": args.context,
            "dtype": str(model.compute_dtype).removeprefix("torch."),
        }
        if args.json:
            print(json.dumps(row | machine()), flush=True)
        else:
            print(
                f"{name:18}  {row['tokens_per_prompt']} tokens a prompt; a question takes {row['one_ms']} ms prompt by "
                f"prompt, {row['batched_ms']} in batches, {row['ours_ms']} with shared prefixes: ratio {row['ratio']}",
                flush=True,
            )


if __name__ == "__main__":
    main()

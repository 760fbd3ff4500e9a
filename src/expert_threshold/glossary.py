"""The project's terms, one sentence each, for `et --help`, the web pages and docs/glossary.md."""

from __future__ import annotations

from html import escape

TERMS = {
    "score": "The number that the router gives a token for an expert, before any activation.",
    "gate": "The factor that multiplies an expert's output: in the paper's rules, the sigmoid of the score.",
    "rule": "A way of turning scores into gates and an assignment of tokens to experts, such as expert threshold.",
    "fanout": "The number of routed experts that a token goes to. The shared expert is not counted.",
    "load": "The number of tokens that go to an expert.",
    "usage": "An expert's load divided by the number of tokens.",
    "pool": "The tokens that compete for an expert in one selection: a sequence, a batch, or the batches of all ranks.",
    "k": "The target load of an expert: the number of tokens in the pool × experts per token / number of experts.",
    "cutoff": "The score a token must exceed to go to an expert: a running mean of each batch's k-th largest score.",
    "cut": "The score that separates chosen from other tokens in training: the cutoff, unless a load bound moves it.",
    "slack": "The share of k by which a load may differ from k in training: from k(1 − slack) to k(1 + slack).",
    "saturation": "The share of the tokens above the cutoff that the upper bound on the load drops.",
    "starvation": "The number of tokens below the cutoff that the lower bound on the load adds, as a share of k.",
    "warmup": "The first training steps, in which expert threshold routes like expert choice while cutoffs settle.",
    "dial": "A way of changing a trained model's cutoffs to reach a rate: the mean number of routed experts per token.",
    "sketch": "Quantiles of an expert's scores, stored with its cutoff. The dial computes other cutoffs from them.",
    "observation": "The statistics of a forward pass that the rule, the metrics and the figures need, such as loads.",
    "trace": "A checkpoint's scores, assignment and losses on a text, token by token. Many figures use traces.",
}


def as_text() -> str:
    """Return one line per term, for a terminal."""
    width = max(map(len, TERMS))
    return "\n".join(f"  {term:{width}}  {meaning}" for term, meaning in TERMS.items())


def as_html() -> str:
    """Return an HTML element that unfolds into a list of all terms, for a page."""
    words = "\n".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in TERMS.items())
    return f'<details class="words"><summary>Glossary</summary><dl>\n{words}\n</dl></details>\n'

"""The project's terms, one sentence each, for `et --help`, the web pages and docs/glossary.md."""

from __future__ import annotations

from html import escape

TERMS = {
    "score": "The number that the router gives a token for an expert, before any activation.",
    "gate": "The number that an expert's output is multiplied by: the sigmoid of the score in the paper's rules.",
    "rule": "How scores become gates and an assignment of tokens to experts. Expert threshold is one rule.",
    "fanout": "The number of routed experts that a token goes to; the shared expert never counts.",
    "load": "The number of tokens that go to an expert.",
    "usage": "An expert's load divided by the number of tokens.",
    "pool": "The tokens that compete for an expert in one selection: a sequence, a batch, or all ranks' batches.",
    "k": "The target load: tokens of the pool × experts per token / number of experts.",
    "cutoff": "The score that a token must exceed to go to an expert: a running mean of the batches' k-th largest.",
    "cut": "The score that divides a pool in training: the cutoff, unless a bound on the load moves it.",
    "slack": "The share of k by which a load may differ from it in training: from k(1 − slack) to k(1 + slack).",
    "saturation": "The share of tokens above the cutoff that the upper bound on the load drops.",
    "starvation": "The share of tokens below the cutoff that the lower bound on the load adds.",
    "warmup": "The first steps, in which expert threshold routes as expert choice does, while cutoffs settle.",
    "dial": "Other cutoffs for a trained model, chosen for a rate: the mean number of routed experts per token.",
    "sketch": "Quantiles of an expert's scores, stored with its cutoff. The dial reads other cutoffs off it.",
    "observation": "The statistics of a forward pass that the rule, the metrics and the figures need, such as loads.",
    "trace": "A checkpoint's scores, assignment and losses on a text, token by token. Figures are drawn from it.",
}


def as_text() -> str:
    """Return one line per term, for a terminal."""
    width = max(map(len, TERMS))
    return "\n".join(f"  {term:{width}}  {meaning}" for term, meaning in TERMS.items())


def as_html() -> str:
    """Return an HTML element that unfolds into a list of all terms, for a page."""
    words = "\n".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in TERMS.items())
    return f'<details class="words"><summary>Glossary</summary><dl>\n{words}\n</dl></details>\n'

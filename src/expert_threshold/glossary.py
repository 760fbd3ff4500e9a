"""The project's words, one sentence each: `et --help`, the pages and docs/glossary.md show these."""

from __future__ import annotations

from html import escape

TERMS = {
    "score": "The number that the router gives a token for an expert, before any activation.",
    "gate": "The number that an expert's output is multiplied by: the sigmoid of the score in the paper's rules.",
    "rule": "How scores become an assignment of tokens to experts, and gates: expert threshold is one.",
    "fanout": "The number of routed experts that a token goes to; the shared expert never counts.",
    "load": "The number of tokens that go to an expert.",
    "usage": "An expert's load divided by the number of tokens.",
    "pool": "The tokens that compete for an expert in one selection: a sequence, a batch, all ranks' batches.",
    "k": "The load aimed at: tokens of the pool × experts per token / number of experts.",
    "cutoff": "The score that a token has to exceed to go to an expert: a running mean of each batch's k-th largest.",
    "cut": "The score at which training in fact divides a pool: the cutoff, unless a bound on the load moves it.",
    "slack": "How far training lets a load be from k, as a share of it: from k(1 − slack) to k(1 + slack).",
    "saturation": "Tokens above the cutoff that the upper bound on the load drops, as a share.",
    "starvation": "Tokens below the cutoff that the lower bound on the load fills in, as a share.",
    "warmup": "First steps that a rule routes otherwise: expert threshold as expert choice, while its cutoffs settle.",
    "dial": "Other cutoffs for a trained model, so that it runs at another rate: routed experts per token, on average.",
    "sketch": "Quantiles of an expert's scores, kept beside its cutoff; the dial reads other cutoffs off it.",
    "observation": "What one forward pass saw and the rule, the metrics and the figures need: loads, batch cutoffs.",
    "trace": "A checkpoint's scores, assignment and losses on a text, token by token, that figures are made of.",
}


def as_text() -> str:
    """Returns a line for each word, for a terminal."""
    width = max(map(len, TERMS))
    return "\n".join(f"  {term:{width}}  {meaning}" for term, meaning in TERMS.items())


def as_html() -> str:
    """Returns an element that opens to a list of all words, for a page."""
    words = "\n".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in TERMS.items())
    return f'<details class="words"><summary>What the words mean</summary><dl>\n{words}\n</dl></details>\n'

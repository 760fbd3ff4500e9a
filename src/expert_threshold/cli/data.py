"""`et data`: downloads text and the questions of CORE, trains tokenizers, and tokenizes text in advance."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from ..analysis.sentences import short
from ..data import Tokenizer, open_source, public
from ..data.files import find
from ..data.public import CORE, FINEWEB_EDU, HUB, cache_folder, require_writable
from ..data.tokenizer import require_vocab_size
from ..data.tokens import TOKENIZER, Parts, write_tokens
from ..evaluation import read_bundle
from ..files import expand, replacing
from ..install import et
from ..option import Count
from ..runs.lock import exclusive
from ..train.log import Display, clock, say
from . import choose
from .options import Option, parse_all

Given = Mapping[str, Any]
BESIDE = f"SOURCE/{TOKENIZER}"
SOURCE = Option("source", str, FINEWEB_EDU, "Text: a folder of shards, or fineweb-edu if it was downloaded.", True)
TEXT_FIELD = Option("text_field", str, "text", "Name of the column with the text.")
OUT = "use another --out"


class Entry(NamedTuple):
    run: Callable[[Given, Display], str]  # returns what to print at the end
    summary: str
    options: Sequence[Option]


def run(arguments: Sequence[str]) -> None:
    """Run the subcommand named by the first argument."""
    about = "Download text and the questions of CORE, train a tokenizer, or tokenize text in advance."
    summaries = {name: entry.summary for name, entry in ENTRIES.items()}
    name, rest = choose("et data", "subcommand", about, summaries, arguments)
    entry = ENTRIES[name]
    summary = entry.summary[0].upper() + entry.summary[1:] + "."
    options = parse_all(f"et data {name}", summary, entry.options, rest)
    with Display(Console(stderr=True)) as display:
        text = entry.run(options, display)
    say(Console(), text)


@contextlib.contextmanager
def _cache(part: str) -> Iterator[Path]:
    """Yield the cache folder while holding an exclusive lock on its `part`."""
    folder = cache_folder()
    with exclusive(require_writable(folder / part) / ".lock"):
        yield folder


def _fineweb_edu(given: Given, display: Display) -> str:
    with _cache(FINEWEB_EDU) as cache:
        start = time.monotonic()
        paths = public.fetch_fineweb_edu(cache, given["shards"], display.task("downloading"))
    size, took = short(sum(path.stat().st_size for path in paths)), clock(time.monotonic() - start)
    shards = f"{len(paths)} shards, {size} bytes, in {paths[0].parent}, {took}; the last is for validation"
    return f"{shards}\nnext: {et()} data tokenizer"


def _hub(given: Given, display: Display) -> str:
    with _cache(HUB) as cache:
        folder = public.fetch_dataset(cache, given["dataset"], given["files"], display.task("downloading"))
    return f"{len(find(folder))} files in {folder}\nnext: {et()} train --data {shlex.quote(str(folder))}"


def _core(given: Given, display: Display) -> str:
    with _cache("") as cache:
        folder = public.fetch_core(cache, display.task("downloading"))
    return f"{len(read_bundle(folder))} tasks in {folder}\nnext: {et()} evaluate RUN"


def _tokenizer(given: Given, display: Display) -> str:
    require_vocab_size(given["vocab_size"])
    corpus = open_source(given["source"], given["text_field"])
    if given["out"] is None and _beside(given).is_file():
        raise ValueError(f"--out is required because {given['source']} is not a folder; choose the file to create")
    out = Path(given["out"] or _beside(given) / TOKENIZER)
    if out.exists():
        raise ValueError(f"{out} already exists; use another --out")
    require_writable(out.absolute().parent, OUT)
    start = time.monotonic()
    display.say(corpus.describe())
    display.say(f"training a tokenizer of {given['vocab_size']:,} tokens")
    tokenizer = Tokenizer.train(corpus.beginning(given["characters"], display.task("reading")), given["vocab_size"])
    with replacing(out) as temporary:
        tokenizer.save(temporary)
    return f"{tokenizer.vocab_size:,} tokens in {out}, {clock(time.monotonic() - start)}"


def _tokenize(given: Given, display: Display) -> str:
    corpus = open_source(given["source"], given["text_field"])
    if corpus.parts is None or corpus.tokenized:
        raise ValueError(f"{corpus.name} does not have two or more Parquet shards, which can be tokenized in advance")
    tokenizer = Tokenizer.load(given["tokenizer"]) if given["tokenizer"] else corpus.tokenizer
    if tokenizer is None:
        raise ValueError(f"{corpus.name} has no {TOKENIZER}; train one with et data tokenizer, or use --tokenizer")
    out = Path(given["out"] or f"{_beside(given)}-tokens")
    require_writable(out.absolute().parent, OUT)
    display.say(corpus.describe())
    about = {"corpus": corpus.hash, "sizes": {split: list(size) for split, size in corpus.sizes.items()}}
    splits: dict[str, Parts] = {split: corpus.parts(split, tokenizer) for split in corpus.sizes}
    with exclusive(out.absolute().with_name(f".lock-{out.name}")):
        write_tokens(out, splits, tokenizer, about, progress=display.task("tokenizing"))
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    train = f"{et()} train --data {shlex.quote(str(out))} --vocab-size {tokenizer.vocab_size}"
    return f"{short(size)} bytes in {out}\nnext: {train}"


def _beside(given: Given) -> Path:
    """Return the folder that contains the text."""
    return cache_folder() / FINEWEB_EDU if given["source"] == FINEWEB_EDU else expand(given["source"])


ENTRIES = {
    FINEWEB_EDU: Entry(
        _fineweb_edu,
        "download training shards of FineWeb-Edu, and its validation shard",
        [Option("shards", int, 8, "Number of training shards. Each contains about 50 million tokens (100 MB).")],
    ),
    HUB: Entry(
        _hub,
        "download a data set from the Hugging Face hub",
        [
            Option("dataset", str, None, "Name of the data set, as OWNER/NAME.", positional=True, required=True),
            Option("files", str, "*", "Pattern that matches the text files to download, such as 'data/train-*'."),
        ],
    ),
    CORE: Entry(_core, "download the questions of CORE, for et evaluate", []),
    "tokenizer": Entry(
        _tokenizer,
        "train a tokenizer on the start of the text",
        [
            SOURCE,
            Option("vocab_size", int, 65536, "Number of tokens in the vocabulary."),
            Option("characters", Count, 2_000_000_000, "Number of characters to train on, from the start of the text."),
            Option("out", str, BESIDE, "File to create. et train finds it next to two or more shards.", derived=True),
            TEXT_FIELD,
        ],
    ),
    "tokenize": Entry(
        _tokenize,
        "tokenize shards in advance, so that training can read them at almost no cost",
        [
            SOURCE,
            Option("tokenizer", str, BESIDE, "The tokenizer.json to use. Any byte-level BPE works.", derived=True),
            Option("out", str, "SOURCE-tokens", "The folder to create, or to complete if unfinished.", derived=True),
            TEXT_FIELD,
        ],
    ),
}

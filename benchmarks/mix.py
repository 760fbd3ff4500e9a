"""Writes one text from several: their documents cut into pieces, in a random order, as JSON Lines.

    python benchmarks/mix.py DATA/textbooks DATA/novels --out prose.jsonl [--characters 2000] [--megabytes 4] [--seed 0]

A source is anything that `et train --data` accepts. `et train --data prose.jsonl` then has all of them in each batch,
in training and in validation; whole documents of one source after those of another would differ between the two.
With --megabytes, each source gives as much text for training, and none of the text that it holds out for validation.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from common import positive, run

from expert_threshold.data import open_source
from expert_threshold.files import replace_file


def pieces(sources: Sequence[str], characters: int, megabytes: int | None) -> Iterator[str]:
    """Yield the documents of the sources in pieces of at most so many characters, up to `megabytes` of each source."""
    for source in sources:
        corpus, left = open_source(source), math.inf if megabytes is None else megabytes * 1e6
        for split in ("train", "validation") if megabytes is None else ("train",):
            for document in corpus.documents(split):
                for start in range(0, len(document), characters):
                    piece = document[start : start + characters]
                    if left > 0:
                        yield piece
                    left -= len(piece.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--characters", type=positive, default=2000)
    parser.add_argument("--megabytes", type=positive, help="training text of each source; all text if absent")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    mixed = list(pieces(arguments.sources, arguments.characters, arguments.megabytes))
    random.Random(arguments.seed).shuffle(mixed)
    replace_file(arguments.out, "".join(json.dumps({"text": piece}) + "\n" for piece in mixed).encode())
    print(f"{len(mixed):,} pieces in {arguments.out}")


if __name__ == "__main__":
    run(main, "interrupted; nothing was written")

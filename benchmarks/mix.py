"""Writes one text from several: their documents cut into pieces, in a random order, as JSON Lines.

    python benchmarks/mix.py DATA/textbooks DATA/novels --out prose.jsonl [--characters 2000] [--seed 0]

A source is anything that `et train --data` takes. `et train --data prose.jsonl` then has all of them in each batch, and
in training as in validation; whole documents of one source after those of another would differ between the two.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from common import positive, run

from expert_threshold.data import open_source
from expert_threshold.files import replace_file


def pieces(sources: Sequence[str], characters: int) -> Iterator[str]:
    """Yield all documents of the sources, those for training first, in pieces of so many characters or fewer."""
    for source in sources:
        corpus = open_source(source)
        for split in ("train", "validation"):
            for document in corpus.documents(split):
                for start in range(0, len(document), characters):
                    yield document[start : start + characters]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--characters", type=positive, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    mixed = list(pieces(arguments.sources, arguments.characters))
    random.Random(arguments.seed).shuffle(mixed)
    replace_file(arguments.out, "".join(json.dumps({"text": piece}) + "\n" for piece in mixed).encode())
    print(f"{len(mixed):,} pieces in {arguments.out}")


if __name__ == "__main__":
    run(main, "interrupted; nothing was written")

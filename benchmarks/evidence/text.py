"""Builds a large text that is the same for everyone: the C sources in Debian's package linux-source-6.1.

    python benchmarks/evidence/text.py --out FOLDER [--source /usr/src/linux-source-6.1.tar.xz]

A document is a .c or .h file without its header comment, since licences repeat. Documentation is kept for other
evaluations. Omitted are copies, files whose header calls them generated, and files that are not UTF-8 or not of 400 to
100,000 characters. Ordered by the hash of their path, the first 3 MB are the test text, the next 3 MB validation, and
120 MB training. `et train --data` accepts FOLDER/text or, already tokenized, FOLDER/tokens. No choice may depend on
FOLDER/test. In MANIFEST.json, `texts` are hashes of paths and documents; hashes of files also depend on pyarrow.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from shutil import which

import pyarrow
import pyarrow.parquet

from expert_threshold.cli import main as et
from expert_threshold.data import Tokenizer, open_held_out, open_source, pack
from expert_threshold.files import replace_json

HEAD = re.compile(r"\A(?:\s+|//(?:[^\n\\]|\\.)*|/\*.*?\*/)*", re.DOTALL)
GENERATED = re.compile(r"do not (?:edit|modify)|(?:auto|automatically|machine)[ -]*generated|generated file", re.I)
LEAST, MOST = 400, 100_000  # characters of a document
SIZES = {"test": 3_000_000, "validation": 3_000_000, "train": 120_000_000}  # bytes
SHARDS, ROWS = 4, 64  # shards of the training text; documents in a row group, the unit that training reads

Document = tuple[str, str]  # path in the package, text


def documents(source: Path) -> Iterator[Document]:
    """Yield the documents in the package's archive, including copies, in archive order."""
    with tarfile.open(source, "r|*") as archive:
        for member in archive:
            path = member.name.partition("/")[2]  # below the folder named after the package
            if not path.endswith((".c", ".h")) or path.startswith("Documentation/") or not member.isfile():
                continue
            text = archive.extractfile(member).read().decode(errors="replace")
            end = HEAD.match(text).end()
            if LEAST <= len(text) - end <= MOST and "\ufffd" not in text and not GENERATED.search(text[:end]):
                yield path, text[end:]


def split(found: Iterator[Document], sizes: dict[str, int]) -> dict[str, list[Document]]:
    """Return each part's documents, ordered by the hash of their path. Raises ValueError if the text is too short."""
    first: dict[str, Document] = {}  # by text, which drops copies
    for path, text in sorted(found, key=lambda document: digest(document[0])):
        first.setdefault(text, (path, text))
    left, parts = iter(first.values()), {}
    for name, size in sizes.items():
        parts[name] = []
        while size > 0:
            if (document := next(left, None)) is None:
                raise ValueError(f"the text is {size:,} bytes too short for {name}; name another --source")
            parts[name].append(document)
            size -= len(document[1].encode())
    return parts


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def build(source: Path, out: Path, sizes: dict[str, int], vocab_size: int) -> None:
    """Write all files. Raises ValueError if `out` exists or the text is too short."""
    if out.exists():
        raise ValueError(f"--out {out}: already exists; name another folder")
    parts = split(documents(source), sizes)
    files = {f"text/train-{shard}": parts["train"][shard::SHARDS] for shard in range(SHARDS)}
    files |= {"text/validation": parts["validation"], "test/test": parts["test"]}  # `et train` validates on the last
    for name, part in files.items():
        path = out / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pyarrow.table({"path": [path for path, _ in part], "text": [text for _, text in part]})
        pyarrow.parquet.write_table(table, path, ROWS, compression="zstd", use_dictionary=False, write_statistics=False)
    et(["data", "tokenizer", str(out / "text"), "--vocab-size", str(vocab_size), "--characters", "30000000"])
    et(["data", "tokenize", str(out / "text"), "--out", str(out / "tokens")])
    tokenizer, corpus = Tokenizer.load(out / "text" / "tokenizer.json"), open_source(str(out / "tokens"))
    tokens = {name: len(pack(corpus, tokenizer, name)) for name in corpus.sizes}
    tokens["test"] = len(pack(open_held_out(str(out / "test")), tokenizer, "validation"))
    query = ["dpkg-query", "--show", "--showformat=${Version}", source.name.partition(".tar")[0]]
    manifest = {
        "package": source.name,
        "version": subprocess.run(query, capture_output=True, text=True).stdout if which(query[0]) else None,
        "sha256": sha256(source.read_bytes()).hexdigest(),
        "pyarrow": pyarrow.__version__,
        "documents": {name: len(part) for name, part in parts.items()},
        "bytes": {name: sum(len(text.encode()) for _, text in part) for name, part in parts.items()},
        "tokens": tokens,
        "texts": {name: digest("".join(f"{p} {digest(text)}\n" for p, text in part)) for name, part in parts.items()},
        "files": {
            str(p.relative_to(out)): sha256(p.read_bytes()).hexdigest() for p in sorted(out.rglob("*/*")) if p.is_file()
        },
    }
    replace_json(out / "MANIFEST.json", manifest)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--source", type=Path, default=Path("/usr/src/linux-source-6.1.tar.xz"))
    arguments = parser.parse_args()
    try:
        build(arguments.source, arguments.out, SIZES, 4096)
    except (ValueError, OSError, tarfile.TarError) as error:
        parser.error(str(error))

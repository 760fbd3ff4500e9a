"""Text for toy runs."""

from __future__ import annotations

import random
from pathlib import Path

WORDS = ("the", "model", "reads", "text", "and", "learns", "which", "expert", "is", "to", "see", "what", "token")


def toy_shards(folder: Path, documents: int = 60) -> Path:
    """Write two Parquet shards of short documents, the second for validation; returns their folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    chance = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(2):
        texts = [" ".join(chance.choices(WORDS, k=chance.randint(5, 60))) for _ in range(documents)]
        pq.write_table(pa.table({"text": texts}), folder / f"shard_{shard:05}.parquet")
    return folder

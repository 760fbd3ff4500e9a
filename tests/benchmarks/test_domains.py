"""`benchmarks/domains.py`: its mixture and its errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from benchmarks import domains


def test_a_mixture_has_equally_much_of_every_domain_cut_into_pieces(tmp_path: Path) -> None:
    sources = {letter: str(tmp_path / f"{letter}.jsonl") for letter in "xy"}
    for letter, path in sources.items():
        lines = [json.dumps({"text": letter * (3000 + n)}) for n in range(40)]
        Path(path).write_text("\n".join(lines) + "\n")
    sizes = domains.mix(sources, 9000, tmp_path / "mixture.jsonl")
    texts = [json.loads(line)["text"] for line in (tmp_path / "mixture.jsonl").read_text().splitlines()]
    assert max(map(len, texts)) == 2000
    for letter in "xy":
        assert sum(text.count(letter) for text in texts) == sizes[letter]
        assert 9000 <= sizes[letter] < 9000 + 2000  # the last piece is whole


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["a=a.jsonl"], "name two domains or more"),
        (["a=a.jsonl", "a=b.jsonl"], "name two domains or more, each by a name of its own"),
        (["a=a.jsonl", "c=b.jsonl"], "its mixture is of a, b; name these, or another --out"),
    ],
)
def test_other_domains_than_those_of_the_mixture_are_refused(
    named: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mixture.json").write_text('{"a": 1, "b": 1}')
    given = [word for name in named for word in ("--domain", name)]
    monkeypatch.setattr(sys, "argv", ["domains.py", "--out", str(tmp_path), *given])
    with pytest.raises(ValueError, match=message):
        domains.main()
    assert [path.name for path in tmp_path.iterdir()] == ["mixture.json"]

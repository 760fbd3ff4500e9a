"""One rank of the test of radix selection across ranks: `python radix_across_ranks.py RANK RANKS RENDEZVOUS_FILE`."""

from __future__ import annotations

import torch

from expert_threshold.routing import radix, selection
from ranks import join, leave


def main() -> None:
    rank, _, group = join()
    for shares in [(7, 5), (0, 12), (12, 0), (3, 30)]:
        scores = torch.randn(1, sum(shares), 2, generator=torch.Generator().manual_seed(sum(shares))).round()
        mine = scores.split(shares, dim=1)[rank]
        ks = [sum(shares) // 2, 1, 0, sum(shares), 3]
        score, last = radix.select(mine, ks, group)
        expected_score, expected_last = selection._kth_largest_over_ranks(mine, ks, group)
        assert torch.equal(score, expected_score), (rank, shares)
        for found, wanted, kth in zip(last, expected_last, score, strict=True):
            cuts = [selection.Cut(kth, place) for place in (found, wanted)]
            assert torch.equal(*(selection.take(mine, cut) for cut in cuts)), (rank, shares)
    leave()


if __name__ == "__main__":
    main()

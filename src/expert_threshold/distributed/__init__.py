"""Trains on several ranks: rendezvous, process groups and sharded optimizers. Expert-parallel dispatch is in `moe`.

Each rank is a process with one device. Models and optimizers do not depend on this package; it is applied to them.
"""

from .mesh import LocalBatch, Parallel, Status, competes_on_rank, local_batch, mesh_sizes, process_groups
from .optimizer_shards import OptimizerShards, Slice
from .parallelize import parallelize
from .rendezvous import ALONE, INTERRUPTED, Failure, Rendezvous, is_lost_rank, launch

__all__ = [
    "ALONE", "INTERRUPTED", "Failure", "LocalBatch", "OptimizerShards", "Parallel", "Rendezvous", "Slice", "Status",
    "competes_on_rank", "is_lost_rank", "launch", "local_batch", "mesh_sizes", "parallelize",
    "process_groups",
]  # fmt: skip

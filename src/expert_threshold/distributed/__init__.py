"""Training on several ranks: rendezvous, process groups and sharded optimizers, but not expert-parallel dispatch.

One rank is one process with one device. Models and optimizers do not know this package; it is applied from outside.
"""

from .mesh import LocalBatch, Parallel, Status, competes_on_rank, local_batch, mesh_sizes, process_groups
from .optimizer_shards import OptimizerShards, Slice
from .parallelize import parallelize
from .rendezvous import INTERRUPTED, Failure, Rendezvous, from_main, is_lost_rank, launch

__all__ = [
    "INTERRUPTED",
    "Failure",
    "LocalBatch",
    "OptimizerShards",
    "Parallel",
    "Rendezvous",
    "Slice",
    "Status",
    "competes_on_rank",
    "from_main",
    "is_lost_rank",
    "launch",
    "local_batch",
    "mesh_sizes",
    "parallelize",
    "process_groups",
]

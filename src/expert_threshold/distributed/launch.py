"""Launches one process per rank, and recognises the loss of one."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Sequence

import torch.distributed as dist

# torch raises plain RuntimeErrors for most of these, with no type or code to match on.
LOST = re.compile(
    "connection (was )?(closed|reset|refused)|timed? ?out|broken pipe|remote (process|peer)|heartbeat", re.IGNORECASE
)


def is_lost_rank(error: BaseException) -> bool:
    """Return True for the errors that a collective raises when another rank has exited or does not answer."""
    lost = dist.DistNetworkError | dist.DistStoreError
    return isinstance(error, lost) or (isinstance(error, RuntimeError) and bool(LOST.search(str(error))))


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run Python with these arguments in `processes` local processes through torchrun's launcher; return the exit code.

    The launcher forwards signals and waits for the ranks.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Ranks report their own failures. Setting a level here would not do: torch sets one on each child logger.
    launcher = logging.getLogger("torch.distributed.elastic")
    launcher.addHandler(logging.NullHandler())
    launcher.propagate = False
    cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # ranks report a lost store themselves
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else ["SIGHUP"]  # as nohup ignores it
    # Without local_addr, ranks would look for the machine's own name, which not every machine resolves.
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id="none", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, local_addr="localhost",
        signals_to_handle=",".join(["SIGTERM", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", *hangup]),
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as failed:
        codes = [failure.exitcode for failure in failed.failures.values()]
        return max(codes) if max(codes) > 0 else 1  # a rank that died of a signal has a negative code
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0

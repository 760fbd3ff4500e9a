"""Tiles of our Triton kernels for one shape: compiled by all cores at once, tried in turn, the fastest written."""

from __future__ import annotations

import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch

from .compiler import Launch, launches
from .setting import NotRunError, Row, Setting

FILE = "tiles.json"
TILES = "EXPERT_THRESHOLD_TILES"  # names such a file for the kernels


def tune(d_model: int, d_expert: int, experts: int, setting: Setting) -> Row:
    """Let Triton's tuner choose tiles for a layer's shape, and add its choice to FOLDER/tiles.json.

    The compiler is what takes long, so the tuner's candidates are compiled in many processes first, into Triton's
    cache on disk. Raises NotRunError without a card or without Triton.
    """
    if not setting.cuda:
        raise NotRunError("needs a card: tiles are chosen by time")
    try:
        from expert_threshold.kernels.gpu import experts as kernels
        from expert_threshold.kernels.gpu.tiles import write_tiles
    except ImportError:
        raise NotRunError("triton is not installed") from None
    shape = (d_model, d_expert, experts)
    compiled = compile_ahead(shape, setting)
    kernels._tune(torch.Size((experts, d_expert, d_model)), d_expert, setting.dtype, setting.device)
    rows = chosen(kernels)
    others = [row for row in tiles_so_far(setting) if row["constants"] not in [new["constants"] for new in rows]]
    write_tiles(setting.out / FILE, setting.device, others + rows)
    return {"compiled_ahead": compiled, "tiles": rows}


def tiles_so_far(setting: Setting) -> list[Row]:
    """Return the rows of FOLDER/tiles.json."""
    path = setting.out / FILE
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["tiles"] if path.exists() else []
    return rows


def are_tuned(d_model: int, d_expert: int, setting: Setting) -> bool:
    """Return True if tiles were chosen for this shape, so that no tuner starts while it is timed."""
    sizes = {"d_in": d_model, "d_out": d_expert}
    return any(sizes.items() <= row["constants"].items() for row in tiles_so_far(setting))


def use_one_tile(setting: Setting) -> None:
    """Let every launch of this process, and of those it starts, have the tuner's first tiles, whatever its sizes."""
    from expert_threshold.kernels.gpu.experts import CONFIGS, TUNED
    from expert_threshold.kernels.gpu.tiles import write_tiles

    path = setting.out / "first-tiles.json"
    rows = [{"kernel": kernel.__name__, "constants": {}, "tiles": _tiles(CONFIGS[0])} for kernel in TUNED]
    write_tiles(path, setting.device, rows)
    os.environ[TILES] = str(path)


def _tiles(config: Any) -> dict[str, int]:
    return dict(config.kwargs) | {"num_warps": config.num_warps, "num_stages": config.num_stages}


def chosen(kernels: Any) -> list[Row]:
    """Return what the tuner has chosen so far in this process."""
    found = []
    for kernel, tuner in kernels.TUNED.items():
        for key, config in tuner.cache.items():
            constants = dict(zip(tuner.keys, key, strict=False))  # the dtypes of arguments follow
            found.append({"kernel": kernel.__name__, "constants": constants, "tiles": _tiles(config)})
    return found


def compile_ahead(shape: tuple[int, int, int], setting: Setting) -> int:
    """Compile every product of a shape in every tile, in as many processes as there are cores; return how many.

    What does not compile, or not in the time left, is left to the tuner.
    """
    from expert_threshold.kernels.gpu.experts import CONFIGS

    count = sum(launch.is_product for launch in launches(*shape))
    work = [(shape, place, way) for way in range(len(CONFIGS)) for place in range(count)]
    context = multiprocessing.get_context("spawn")
    done = 0
    with ProcessPoolExecutor(max(min(os.cpu_count() or 1, len(work), 16), 1), mp_context=context) as pool:
        futures = [pool.submit(compile_one, *each) for each in work]
        try:
            for future in as_completed(futures, timeout=max(setting.left - 10, 1)):
                done += future.exception() is None
        except TimeoutError:
            for future in futures:
                future.cancel()
    return done


def compile_one(shape: tuple[int, int, int], place: int, way: int) -> None:
    """Compile one product in one tile as a launch on this machine's card would, which leaves it in Triton's cache."""
    from expert_threshold.kernels.gpu.experts import CONFIGS

    launch: Launch = [each for each in launches(*shape) if each.is_product][place]
    config = CONFIGS[way]
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    launch.kernel.warmup(*launch.arguments, grid=(1,), **launch.constants, **config.kwargs, **options)

"""Every Triton kernel compiles for GPUs that are not here, and spills nothing on an H100."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.gpu import ROOT
from benchmarks.gpu.compile import PROCESSORS

pytestmark = pytest.mark.timeout(1500)
PROGRAM = """
import json, sys
from benchmarks.gpu.compile import every_launch, measure, tools
from benchmarks.gpu.setting import NotRunError
try:
    tools()
    every = every_launch(dry=False)
    first = [launch for launch in every if launch.tiles in ("", every[0].tiles)]  # of the tuner's tiles
    print(json.dumps([measure(launch, int(sys.argv[1])) for launch in first]))
except NotRunError as reason:
    print(reason)
    sys.exit(77)
"""


@pytest.mark.parametrize("capability", [pytest.param(c, marks=[pytest.mark.soak] * (c != 90)) for c in PROCESSORS])
def test_the_kernels_compile_with_matrix_instructions_and_fit_the_gpu(capability: int, tmp_path: Path) -> None:
    """In a separate process, since triton interprets in tests."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, str(capability)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    kernels = {row["kernel"].split(" ")[0] for row in rows}
    assert kernels == {"multiply", "multiply_segments", "softmax_slopes", "sum_by_token", "spread_gates", "radix"}
    assert any("d_in=160" in row["kernel"] for row in rows)  # no multiple of a tile, which spilled
    for row in rows:
        assert row["fits"], row
        assert row["stack_bytes"] == 0 or capability != 90, row
        if row["kernel"].startswith("multiply"):
            assert row["matrix_instructions"] > 0, row

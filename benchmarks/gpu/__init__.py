"""The truth about one GPU from one command: `python -m benchmarks.gpu --minutes 9 --out FOLDER`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The checkout's own code, installed or not; last the tests' cases and the scripts that this package shares pieces with.
sys.path.insert(0, str(ROOT / "src"))
sys.path.extend(str(ROOT / folder) for folder in ("tests/helpers", "benchmarks"))

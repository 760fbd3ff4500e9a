"""The truth about one GPU from one command: `python -m benchmarks.gpu --minutes 9 --out FOLDER`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The checkout's own code, installed or not; the scripts that this package shares pieces with; the tests' cases.
for folder in (ROOT / "tests", ROOT / "benchmarks", ROOT / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

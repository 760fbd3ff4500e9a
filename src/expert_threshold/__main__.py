"""`python -m expert_threshold` is `et`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())

"""Makes `tests/` importable, for the fake service."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

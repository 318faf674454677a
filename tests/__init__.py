"""The tests, which mirror the package."""

import os
import sys

from tests.matmul import use_openblas

# Workers and the processes of tests compile the package's modules once, not each again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
use_openblas()

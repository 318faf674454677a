"""The tests, which mirror the package."""

from tests.matmul import use_openblas
from tests.scheduling import use_one_core

use_one_core()
use_openblas()

"""The tests, which mirror the package."""

from tests.matmul import use_openblas

use_openblas()

"""mlx-lm is imported with the limit of open files that there is."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource
{imported}
import mlx_lm.utils
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limits_after(imported: str, limit: str) -> list[int]:
    """(soft, hard) after importing with `ulimit ARGUMENTS`."""
    script = f'ulimit {limit}; exec "$0" -c "$1"'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, CODE.format(imported=imported)],
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(part) for part in done.stdout.split()]


@pytest.mark.parametrize(
    ("limit", "after"),
    [
        ("-n 1024", [1024, 1024]),
        ("-n 3000", [3000, 3000]),
        ("-Sn 256; ulimit -Hn 3000", [2048, 3000]),
    ],
)
def test_the_limit_is_kept_and_raised_only_as_far_as_it_may_be(limit, after):
    assert limits_after("import your_ai", limit) == after


@pytest.mark.parametrize("imported", ["nets.model", "generation.generate", "serving.server"])
def test_whatever_imports_mlx_lm_first_keeps_the_limit(imported):
    assert limits_after(f"import your_ai.{imported}", "-n 1024") == [1024, 1024]

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.studio.client import Client, opened


@pytest.fixture
def client(own_folder) -> Iterator[Client]:
    with opened() as found:
        yield found

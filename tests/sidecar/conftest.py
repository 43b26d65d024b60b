"""Fixtures of the sidecar's tests."""

import os
from collections.abc import Iterator

import pytest

from tests.sidecar.sandbox import Sandbox


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    if os.geteuid() != 0:
        pytest.skip("needs root: network namespaces")
    made = Sandbox()
    yield made
    made.close()

"""Fixtures of the GPU tests: the compiled stub, a pod, and what its GPUs do."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.gpu.harness import Pod, Scenario, build_stub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libnvidia-ml.so.1 that the scenario drives."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed: the stub of NVML cannot be compiled")
    return build_stub(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def pod(tmp_path: Path, library: Path) -> Iterator[Pod]:
    """A pod's namespaces."""
    if os.geteuid() != 0:
        pytest.skip("not root: a pod's namespaces cannot be made")
    made = Pod(tmp_path, library)
    yield made
    made.close()


@pytest.fixture
def scenario(tmp_path: Path) -> Callable[[str], Scenario]:
    """Makes the scenario of a base file, or an empty one."""

    def make(base: str) -> Scenario:
        return Scenario(tmp_path / "scenario", base)

    return make

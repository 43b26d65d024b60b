"""Fixtures of the eBPF tests: they load real programs into this machine's kernel."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from sidecar.ebpf import loader
from tests.sidecar.sandbox import Sandbox

BCC_PYTHON = "/usr/bin/python3"


def why_not() -> str | None:
    """Says what keeps programs from being loaded here; None where nothing does."""
    if os.geteuid() != 0:
        return "needs root: eBPF"
    if not os.path.exists("/sys/kernel/btf/vmlinux"):
        return "this kernel has no BTF"
    found = subprocess.run([BCC_PYTHON, "-c", "import bcc"], check=False, capture_output=True)
    return None if found.returncode == 0 else f"{BCC_PYTHON} has no bcc (python3-bpfcc)"


@pytest.fixture(scope="session")
def load() -> loader.Loader:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    return loader.Loader(python=BCC_PYTHON)


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    if os.geteuid() != 0:
        pytest.skip("needs root: network namespaces")
    made = Sandbox()
    yield made
    made.close()


@pytest.fixture
def other() -> Iterator[Sandbox]:
    """A second pod, to show that what happens there is not seen."""
    made = Sandbox()
    yield made
    made.close()

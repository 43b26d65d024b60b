"""Fixtures of the webhook's tests: a server, an API server where there is one."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import pytest

from tests.webhook.kube import ApiServer, missing_binaries, running_api_server
from tests.webhook.support import Files, Server, running_server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def client_context(tls: Files) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(tls.root))


@pytest.fixture(scope="session")
def server(tls: Files, client_context: ssl.SSLContext) -> Iterator[Server]:
    """The real command with the default configuration and a certificate in files."""
    files = ("--tls-cert", str(tls.cert), "--tls-key", str(tls.key))
    with running_server(tls.folder, *files, context=client_context) as running:
        yield running


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A real kube-apiserver with etcd, without kubelets: what it admits and stores is real."""
    if missing := missing_binaries():
        pytest.skip(missing)
    with running_api_server(tmp_path_factory.mktemp("kube")) as running:
        yield running

"""A caBundle that someone blanks is seen within seconds, not at the next run of the upkeep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml
from prometheus_client import CollectorRegistry

from tests.webhook.kube import TOKEN
from tests.webhook.kubeobjects import webhook_configuration
from tests.webhook.restpeer import Peer, running_peer
from tests.webhook.support import Files
from webhook.cluster import WEBHOOKS
from webhook.glance import EVERY, Glance, in_pod
from webhook.metrics import Metrics
from webhook.upkeep import INTERVAL, Task, Upkeep

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = f"{WEBHOOKS}/kitty"


@pytest.fixture
def peer(tmp_path: Path, tls: Files) -> Iterator[Peer]:
    with running_peer(tmp_path, tls) as running:
        yield running


@pytest.fixture
def glance(peer: Peer, tmp_path: Path, tls: Files) -> Iterator[Glance]:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "ca.crt").write_bytes(tls.root.read_bytes())
    server = yaml.safe_load(peer.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
    made = Glance(
        name="kitty", host="127.0.0.1", port=int(server.rpartition(":")[2]), account=str(tmp_path)
    )
    yield made
    made.close()


def put(peer: Peer, bundle: str) -> int:
    configuration = webhook_configuration(lambda path: {"url": f"https://x{path}"}, name="kitty")
    for entry in configuration["webhooks"]:
        if bundle:
            entry["clientConfig"]["caBundle"] = bundle
    peer.put(CONFIG, configuration)
    return len(configuration["webhooks"])


def test_it_tells_the_bundle_of_every_entry(peer: Peer, glance: Glance) -> None:
    entries = put(peer, "Qg==")
    assert glance.bundles() == ("Qg==",) * entries
    put(peer, "")
    assert glance.bundles() == ("",) * entries


def test_what_cannot_be_seen_is_not_called_blank(peer: Peer, glance: Glance) -> None:
    assert glance.bundles() is None
    put(peer, "Qg==")
    peer.refuse = lambda _method, _path: 403
    assert glance.bundles() is None
    peer.refuse = lambda _method, _path: 0
    assert glance.bundles()


def test_nobody_who_listens_is_no_error(tmp_path: Path, tls: Files) -> None:
    (tmp_path / "token").write_text("t")
    (tmp_path / "ca.crt").write_bytes(tls.root.read_bytes())
    assert Glance(name="k", host="127.0.0.1", port=1, account=str(tmp_path)).bundles() is None
    assert Glance(name="k", host="127.0.0.1", port=1, account="/absent").bundles() is None


def test_outside_of_a_pod_there_is_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert in_pod("kitty") is None


class Sleeper:
    """A clock that only waiting moves, and what is seen at each look."""

    def __init__(self, seen: list[tuple[str, ...] | None]) -> None:
        self.now = 0.0
        self._seen = iter(seen)
        self.upkeep = Upkeep(
            task=Task(),
            pem=None,
            metrics=Metrics(registry=CollectorRegistry()),
            clock=lambda: self.now,
            sleep=self._sleep,
            glance=lambda: next(self._seen),
        )

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("seen", "rounds"),
    [
        ([("a",), ("a",), ("",)], 2),
        ([("a",), None, ("b",)], 2),
        ([None, None, ("a",), ("b",)], 3),
        ([("",), ("",)], 1),
        ([("a",)] * 13, 12),
        ([None] * 13, 12),
    ],
)
def test_the_loop_rests_until_a_bundle_changes(
    seen: list[tuple[str, ...] | None], rounds: int
) -> None:
    sleeper = Sleeper(seen)
    sleeper.upkeep.rest(INTERVAL)
    assert sleeper.now == rounds * EVERY


def test_after_a_failure_the_retry_is_waited_for() -> None:
    sleeper = Sleeper([])
    sleeper.upkeep.rest(4.0)
    assert sleeper.now == 4.0

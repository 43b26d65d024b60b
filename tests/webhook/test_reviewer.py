"""One review: what happens when the webhook itself fails, and pods that come back."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.webhook.support import patched, review_of
from webhook.config import Config
from webhook.decision import Skip
from webhook.metrics import Metrics
from webhook.patch import add, apply, pointer
from webhook.profiles import Level
from webhook.reviewer import Reviewer

POD: dict[str, Any] = {
    "kind": "Pod",
    "metadata": {"name": "a"},
    "spec": {"containers": [{"name": "c", "image": "i"}], "restartPolicy": "Never"},
}


class Hook:
    """A reviewer with its metrics, and what a pod becomes through it."""

    def __init__(self, **more: Any) -> None:
        self.metrics = Metrics(registry=CollectorRegistry())
        self.reviewer = Reviewer(config=Config(), metrics=self.metrics, **more)

    def review(self, pod: Any, level: Level | None = None, **more: Any) -> dict[str, Any]:
        body = json.dumps(review_of(pod, **more)).encode()
        response: dict[str, Any] = json.loads(self.reviewer.review(body, level))["response"]
        return response

    def become(self, pod: Any) -> dict[str, Any]:
        return patched(pod, self.review(pod))

    def sample(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


@pytest.mark.parametrize("error", [ValueError("x"), RecursionError(), KeyError(1), MemoryError()])
def test_a_failure_of_its_own_lets_the_pod_through(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    hook = Hook(decide=fail)
    with caplog.at_level(logging.ERROR):
        response = hook.review(POD)
    assert response["allowed"] is True
    assert "patch" not in response
    assert ["internal-error" in warning for warning in response["warnings"]] == [True]
    assert len(caplog.records) == 1
    assert hook.sample("kitty_webhook_errors_total") == 1
    assert hook.sample("kitty_webhook_skipped_total", reason="internal-error") == 1


def test_every_outcome_is_counted() -> None:
    hook = Hook(oldest=lambda: (1, 30))
    hook.review(POD)
    hook.review(POD, Level.RESTRICTED)
    hook.review(hook.become(POD))
    native = {"lifecycle": "native"}
    assert hook.sample("kitty_webhook_injected_total", profile="privileged", **native) == 2
    assert hook.sample("kitty_webhook_injected_total", profile="unprivileged", **native) == 1
    assert hook.sample("kitty_webhook_skipped_total", reason="already-injected") == 1
    assert hook.sample("kitty_webhook_review_duration_seconds_count") == 4


def test_reasons_are_there_before_they_happen() -> None:
    hook = Hook()
    for reason in Skip:
        assert hook.sample("kitty_webhook_skipped_total", reason=reason) == 0


def test_a_restart_policy_that_an_old_model_stripped_is_put_back() -> None:
    """Another webhook decoded the pod into types that do not know the field; we are asked again."""
    hook = Hook(oldest=lambda: (1, 30))
    whole = hook.become(POD)
    stripped = copy.deepcopy(whole)
    del stripped["spec"]["initContainers"][0]["restartPolicy"]
    assert hook.become(stripped) == whole
    assert hook.sample("kitty_webhook_restored_total") == 1


def test_a_pod_of_an_older_version_is_left_as_it_is() -> None:
    hook = Hook()
    old = hook.become(POD)
    old["spec"]["containers"][-1]["image"] = "kitty-sidecar:0.0.1"
    old["metadata"]["annotations"]["kitty.k10s.dev/status"] = '{"version":"0.0.1"}'
    response = hook.review(old)
    assert "patch" not in response
    assert "warnings" not in response


def test_a_copied_status_without_a_sidecar_does_not_count() -> None:
    pod = copy.deepcopy(POD)
    pod["metadata"]["annotations"] = {"kitty.k10s.dev/status": '{"version":"0.1.0"}'}
    assert Hook().become(pod)["spec"]["containers"][-1]["name"] == "kitty"


def test_ephemeral_containers_stay_as_they_are() -> None:
    pod = copy.deepcopy(POD)
    pod["spec"]["ephemeralContainers"] = [{"name": "debug", "image": "i"}]
    assert Hook().become(pod)["spec"]["ephemeralContainers"] == [{"name": "debug", "image": "i"}]


def test_mirror_pods_are_not_touched() -> None:
    pod = copy.deepcopy(POD)
    pod["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "x"}
    response = Hook().review(pod)
    assert "patch" not in response
    assert "warnings" not in response


def test_the_namespace_of_the_request_counts() -> None:
    """Controllers leave it out of the metadata; a nameless pod's job falls back to it."""
    pod = {"kind": "Pod", "spec": POD["spec"]}
    after = patched(pod, Hook().review(pod, namespace="ml"))
    assert after["metadata"]["annotations"]["kitty.k10s.dev/job"] == "ml"


def test_host_network_ports_spread_by_the_request() -> None:
    pod = copy.deepcopy(POD)
    pod["spec"]["hostNetwork"] = True
    hook = Hook()
    ports = {
        patched(pod, hook.review(pod, uid=f"uid-{i}"))["metadata"]["annotations"][
            "kitty.k10s.dev/port"
        ]
        for i in range(64)
    }
    assert all(19100 <= int(port) <= 20123 for port in ports)
    assert len(ports) > 50


def test_names_with_slashes_and_tildes_are_escaped() -> None:
    pod = copy.deepcopy(POD)
    pod["metadata"]["annotations"] = {"a~1/b~0": "c"}
    pod["metadata"]["labels"] = {"x/y~": "z"}
    after = Hook().become(pod)
    assert after["metadata"]["annotations"]["a~1/b~0"] == "c"
    assert after["metadata"]["labels"] == {"x/y~": "z", "kitty.k10s.dev/injected": "true"}


def test_the_patch_grows_with_the_watched_containers_only() -> None:
    """Operations, not differences: a thousand variables more are not a byte more."""
    few, many = copy.deepcopy(POD), copy.deepcopy(POD)
    few["spec"]["containers"][0]["env"] = [{"name": "A", "value": "1"}]
    many["spec"]["containers"][0]["env"] = [{"name": f"A{i}", "value": "1"} for i in range(1000)]
    hook = Hook()
    assert hook.review(few)["patch"] == hook.review(many)["patch"]


def test_pointers_escape_what_rfc_6901_says() -> None:
    path = pointer("metadata", "annotations", "a~1/b")
    assert path == "/metadata/annotations/a~01~1b"
    document: dict[str, Any] = {"metadata": {"annotations": {}}}
    apply(document, [add(path, "x")])
    assert document["metadata"]["annotations"] == {"a~1/b": "x"}

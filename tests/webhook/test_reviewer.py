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


@pytest.mark.parametrize("spec", [{}, {"os": {"name": "windows"}}])
def test_annotations_never_grow_beyond_what_the_api_takes(spec: dict[str, Any]) -> None:
    """A pod of more than 256 KiB of annotations is refused, so one that has them stays alone."""
    pod = copy.deepcopy(POD)
    pod["spec"] |= spec
    pod["metadata"]["annotations"] = {"x": "y" * (256 * 1024 - 50)}
    hook = Hook()
    response = hook.review(pod)
    assert "patch" not in response
    assert response["warnings"]
    pod["metadata"]["annotations"]["x"] = "\u00e9" * (128 * 1024 - 2000)
    after = hook.become(pod)["metadata"]["annotations"]
    assert len(after) > 1
    assert sum(len(k.encode()) + len(v.encode()) for k, v in after.items()) <= 256 * 1024


def test_the_names_of_thousands_of_containers_have_to_fit_as_well() -> None:
    hook = Hook()
    for count, fits in ((600, True), (5000, False)):
        pod = copy.deepcopy(POD)
        pod["spec"]["containers"] = [{"name": f"c{i:060d}", "image": "i"} for i in range(count)]
        response = hook.review(pod)
        assert [w for w in response.get("warnings", []) if "annotations-full" in w] == (
            [] if fits else response["warnings"]
        )
        assert fits is (patched(pod, response)["spec"]["containers"][-1]["name"] == "kitty")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("cpu-limit", "\u0662"),
        ("memory-limit", "\u0669\u0669Gi"),
        ("port", "\u0669100"),
        ("image", "a//b"),
        ("image", "Kitty:1"),
        ("image", "kitty:"),
        ("image", "kitty::1"),
        ("image", "kitty@sha256:0"),
        ("image", "kitty:t\u00e4g"),
        ("image", "a" * 256),
        ("image", "x.io:port/kitty"),
    ],
)
def test_a_value_that_would_stop_the_pod_is_ignored(name: str, given: str) -> None:
    """The API server would refuse such a quantity, and a kubelet never start such an image."""
    pod = copy.deepcopy(POD)
    pod["metadata"]["annotations"] = {f"kitty.k10s.dev/{name}": given}
    hook = Hook()
    response = hook.review(pod)
    (warning,) = response["warnings"]
    assert f"annotation {name}" in warning
    assert patched(pod, response)["spec"] == hook.become(POD)["spec"]


@pytest.mark.parametrize(
    "image",
    [
        "kitty",
        "kitty:1",
        "team/kitty_side.car--x:V_1.0-a",
        "localhost:5000/kitty",
        "localhost/kitty:1",
        "Registry.example/kitty:1",
        "[::1]:5000/kitty",
        "x.io/kitty:1@sha256:" + "0f" * 32,
    ],
)
def test_images_that_a_kubelet_takes(image: str) -> None:
    pod = copy.deepcopy(POD)
    pod["metadata"]["annotations"] = {"kitty.k10s.dev/image": image}
    assert Hook().become(pod)["spec"]["containers"][-1]["image"] == image


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (
            "kitty.k10s.dev/cpu-limits",
            'annotation "cpu-limits" ignored: there is none of that name',
        ),
        ("kitty.k10s.dev/inject", "annotation inject ignored: it is a label"),
        ("kitty.k10s.dev/status", ""),
        ("x.io/kitty.k10s.dev/port", ""),
        ("port", ""),
    ],
)
def test_an_annotation_that_means_nothing_is_named(key: str, says: str) -> None:
    pod = copy.deepcopy(POD)
    pod["metadata"]["annotations"] = {key: "1"}
    assert Hook().review(pod).get("warnings", []) == ([f"kitty: {says}"] if says else [])


def test_a_root_trainer_that_restricted_let_in_gets_a_sidecar_that_starts() -> None:
    """Exempt from Pod Security, say: root and non-root in one context would keep it waiting."""
    pod = copy.deepcopy(POD)
    pod["spec"]["containers"][0]["securityContext"] = {"runAsUser": 0, "runAsGroup": 0}
    sidecar = patched(pod, Hook().review(pod, Level.RESTRICTED))["spec"]["containers"][-1]
    assert sidecar["securityContext"]["runAsNonRoot"] is True
    assert not {"runAsUser", "runAsGroup"} & set(sidecar["securityContext"])

"""A pod's manifest is read as a kubelet reads it."""

from typing import Any

import pytest

from lab.podspec import (
    Placement,
    UnsupportedError,
    command_line,
    containers_in_order,
    declared_port,
    environment,
    expand,
    quantity,
)

PLACEMENT = Placement(node="n1", pod_ip="10.0.0.7", host_ip="10.0.0.1", uid="u-1")


def pod(**container: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "p",
            "namespace": "ns",
            "labels": {"app": "x"},
            "annotations": {"kitty.k10s.dev/job": "ring"},
        },
        "spec": {"containers": [{"name": "c", **container}]},
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "p"),
        ("metadata.namespace", "ns"),
        ("metadata.uid", "u-1"),
        ("metadata.labels['app']", "x"),
        ("metadata.annotations['kitty.k10s.dev/job']", "ring"),
        ("metadata.annotations['absent']", ""),
        ("spec.nodeName", "n1"),
        ("status.podIP", "10.0.0.7"),
        ("status.hostIP", "10.0.0.1"),
    ],
)
def test_fields_of_the_downward_api(path: str, value: str) -> None:
    made = pod(env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": path}}}])
    assert environment(made, made["spec"]["containers"][0], PLACEMENT) == {"A": value}


def test_values_refer_to_those_before_them() -> None:
    made = pod(
        env=[
            {"name": "A", "value": "1"},
            {"name": "B", "value": "$(A)-$(C)-$$(A)"},
            {"name": "C"},
        ]
    )
    env = environment(made, made["spec"]["containers"][0], PLACEMENT)
    assert env == {"A": "1", "B": "1-$(C)-$(A)", "C": ""}


@pytest.mark.parametrize(
    "source",
    [{"secretKeyRef": {"name": "s", "key": "k"}}, {"fieldRef": {"fieldPath": "spec.color"}}],
)
def test_a_source_that_is_not_known_is_refused(source: dict[str, Any]) -> None:
    made = pod(env=[{"name": "A", "valueFrom": source}])
    with pytest.raises(UnsupportedError, match=r"secretKeyRef|spec\.color"):
        environment(made, made["spec"]["containers"][0], PLACEMENT)


def test_native_sidecars_start_first_and_ordinary_init_containers_are_refused() -> None:
    made = pod()
    made["spec"]["initContainers"] = [{"name": "kitty", "restartPolicy": "Always"}]
    assert [c["name"] for c in containers_in_order(made)] == ["kitty", "c"]
    made["spec"]["initContainers"].append({"name": "fetch"})
    with pytest.raises(UnsupportedError, match="fetch"):
        containers_in_order(made)


@pytest.mark.parametrize("image", ["kitty-sidecar:0.1", "r.example:5000/k/kitty-sidecar@sha256:00"])
def test_the_entrypoint_of_an_image_runs_where_there_is_no_command(image: str) -> None:
    line = command_line(
        {"name": "k", "image": image, "args": ["-v"]}, {}, {"kitty-sidecar": ["ks"]}
    )
    assert line == ["ks", "-v"]


def test_a_command_replaces_the_entrypoint() -> None:
    container = {"name": "k", "image": "x", "command": ["run", "$(HOW)"], "args": ["$(WHAT)"]}
    assert command_line(container, {"HOW": "fast"}, {}) == ["run", "fast", "$(WHAT)"]
    with pytest.raises(UnsupportedError, match="no entrypoint for 'x'"):
        command_line({"name": "k", "image": "x"}, {}, {})


def test_a_dollar_stays_a_dollar() -> None:
    assert expand("$5 $$ $(", {}) == "$5 $ $("


@pytest.mark.parametrize(
    ("text", "value"), [("250m", 0.25), ("64Mi", 64 << 20), ("2", 2.0), (2, 2.0), ("1.5k", 1500.0)]
)
def test_quantities(text: str | int, value: float) -> None:
    assert quantity(text) == value


def test_what_is_no_quantity_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="3 apples"):
        quantity("3 apples")


def test_a_port_is_found_by_name() -> None:
    container = {"ports": [{"containerPort": 1}, {"name": "m", "containerPort": 9100}]}
    assert declared_port(container, "m") == 9100
    assert declared_port(container, "x") is None

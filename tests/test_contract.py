"""What the webhook writes is what the sidecar reads: names, values, port."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar import agent
from sidecar.config import RTT_HOOKS, Config, from_environment
from webhook.annotations import COLLECTORS as WEBHOOK_COLLECTORS
from webhook.config import RTT_HOOKS as WEBHOOK_RTT_HOOKS

ROOT = Path(__file__).resolve().parents[1]
INJECT = "import sys; from webhook.cli import main; main(sys.argv[1:])"
FIELDS = {
    "spec.nodeName": "gpu-node-7.example",
    "metadata.name": "llm-0",
    "metadata.namespace": "team-a",
    "metadata.uid": "8f6c4b0e-1d5a-4c0b-9a55-6f1f6a0f7b11",
    "status.podIP": "fd00::12",
}
HOST = {"status.hostIP": "fd00::7"}


def injected(annotations: dict[str, str], *flags: str, **spec: Any) -> dict[str, Any]:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "llm-0", "namespace": "team-a", "annotations": annotations},
        "spec": {"containers": [{"name": "trainer", "image": "t"}], **spec},
    }
    pod["metadata"]["labels"] = {"kitty.k10s.dev/inject": "true"}  # type: ignore[index] # a mapping
    return offline(pod, *flags)


def offline(manifest: dict[str, Any], *flags: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", INJECT, "inject", "-f", "-", *flags],
        input=yaml.safe_dump(manifest),
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, Any] = yaml.safe_load(done.stdout)
    return result


def sidecar_of(pod: dict[str, Any]) -> dict[str, Any]:
    spec = pod["spec"]
    (container,) = (
        c for c in [*spec["containers"], *spec.get("initContainers", [])] if c["name"] == "kitty"
    )
    return dict(container)


def environment(container: dict[str, Any], *, told: dict[str, str] | None = None) -> dict[str, str]:
    """What the container gets: the kubelet expands references to what stands before them."""
    values: dict[str, str] = {}
    for entry in container["env"]:
        text = entry.get("value")
        if text is None:
            text = (FIELDS | HOST | (told or {}))[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for name, value in values.items():
            text = text.replace(f"$({name})", value)
        text = text.replace("$$", "$")
        values[entry["name"]] = text
    return values


def config_of(pod: dict[str, Any]) -> Config:
    config, problems = from_environment(
        environment(sidecar_of(pod)), collectors=frozenset(agent.COLLECTORS)
    )
    assert problems == []
    return config


def test_a_plain_pod() -> None:
    pod = injected({}, restartPolicy="Never")
    config = config_of(pod)
    assert (config.node, config.pod, config.namespace, config.pod_uid, config.pod_ip) == tuple(
        FIELDS.values()
    )
    (port,) = sidecar_of(pod)["ports"]
    assert (port["name"], port["containerPort"]) == ("kitty-metrics", config.port)
    assert config.job == pod["metadata"]["annotations"]["kitty.k10s.dev/job"] == "llm-0"
    assert (config.lifecycle, config.restart_policy) == ("ordinary", "Never")
    assert (config.profile, config.collectors, config.rtt_hook) == ("privileged", None, "auto")
    (watch,) = (e for e in pod["spec"]["containers"][0]["env"] if e["name"] == "KITTY_WATCH")
    assert watch["value"] == "1"


@pytest.mark.parametrize("native", ["true", "false"])
def test_every_annotation_arrives(native: str) -> None:
    pod = injected(
        {
            "kitty.k10s.dev/port": "9200",
            "kitty.k10s.dev/job": "llm, größer",
            "kitty.k10s.dev/profile": "capabilities",
            "kitty.k10s.dev/collectors": "pod, tcp",
            "kitty.k10s.dev/native-sidecar": native,
        },
        restartPolicy="OnFailure",
    )
    config = config_of(pod)
    assert config.port == 9200
    assert config.job == "llm, größer"
    assert config.profile == "capabilities"
    assert config.collectors == frozenset({"pod", "tcp"})
    assert config.lifecycle == ("native" if native == "true" else "ordinary")
    assert config.restart_policy == "OnFailure"


def test_a_host_network_pod_publishes_its_port() -> None:
    pod = injected({}, hostNetwork=True)
    assert "ports" not in sidecar_of(pod)
    published = pod["metadata"]["annotations"]["kitty.k10s.dev/port"]
    assert config_of(pod).port == int(published)
    assert 19100 <= int(published) <= 20123


def test_where_a_gpu_pod_finds_its_driver_and_exporter(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "driver-root: /opt/driver\ndcgm-exporter: http://[$(KITTY_HOST_IP)]:9400/metrics\n"
    )
    gpu = {"name": "trainer", "image": "t", "resources": {"limits": {"nvidia.com/gpu": "8"}}}
    config = config_of(injected({}, "--config", str(path), containers=[gpu]))
    assert config.driver_root == "/opt/driver"
    assert config.dcgm_exporter == "http://[fd00::7]:9400/metrics"
    config = config_of(injected({}, "--config", str(path)))
    assert (config.driver_root, config.dcgm_exporter) == ("", "")


def test_a_template_whose_job_a_label_tells() -> None:
    """The kubelet reads the label when the pod is there: each run of a CronJob is a job."""
    template = {"spec": {"containers": [{"name": "trainer", "image": "t"}]}}
    for manifest, way, label, job in (
        (
            {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "nightly"}}
            | {"spec": {"jobTemplate": {"spec": {"template": template}}}},
            ("jobTemplate", "spec", "template"),
            {"metadata.labels['batch.kubernetes.io/job-name']": "nightly-29"},
            "nightly-29",
        ),
        (
            {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet"}
            | {"metadata": {"name": "serve$"}}
            | {"spec": {"leaderWorkerTemplate": {"workerTemplate": template}}},
            ("leaderWorkerTemplate", "workerTemplate"),
            {"metadata.labels['leaderworkerset.sigs.k8s.io/group-index']": "1"},
            "serve$-1",
        ),
    ):
        pod: Any = offline(manifest)["spec"]
        for key in way:
            pod = pod[key]
        seen = environment(sidecar_of(pod), told=label)
        config, problems = from_environment(seen, collectors=frozenset(agent.COLLECTORS))
        assert (config.job, problems) == (job, [])


def test_the_hooks_of_the_configuration_are_the_sidecars() -> None:
    assert RTT_HOOKS == WEBHOOK_RTT_HOOKS


def test_the_collectors_a_user_may_name_are_the_sidecars() -> None:
    assert tuple(agent.COLLECTORS) == WEBHOOK_COLLECTORS
    assert config_of(injected({"kitty.k10s.dev/collectors": "all"})).collectors is None
    row = next(
        line
        for line in (ROOT / "docs" / "annotations.md").read_text().splitlines()
        if line.startswith("| `collectors` |")
    )
    named = re.findall(r"`([a-z]+)`", row.split("|")[2].split(";")[0])
    assert named == ["all", *agent.COLLECTORS]


@pytest.mark.parametrize("value", ["rtt,foo", "all,rtt", "RTT", ","])
def test_unknown_collectors_are_named_and_all_run(value: str) -> None:
    """As every bad value: the sidecar never gets to see it."""
    pod = injected({"kitty.k10s.dev/collectors": value})
    assert "KITTY_COLLECTORS" not in environment(sidecar_of(pod))
    assert config_of(pod).collectors is None

"""The command line: what it says when it is asked the wrong way, and manifests of every kind."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.webhook.support import BIN
from webhook.cli import main
from webhook.config import _KEYS, Config, ConfigError, parse_config
from webhook.profiles import Level, Profile

if TYPE_CHECKING:
    from pathlib import Path

    from tests.webhook.support import Files


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        status = main(arguments)
    except SystemExit as stopped:
        status = stopped.code  # type: ignore[assignment] # argparse gives an int
    assert status == 2
    return capsys.readouterr().err


def test_usage_errors_name_the_flag_and_what_it_may_hold(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "--bind" in usage_error(capsys, "serve", "--bind", "here")
    assert "HOST:PORT" in usage_error(capsys, "serve", "--bind", "[::1:8443")
    assert "HOST:PORT" in usage_error(capsys, "serve", "--metrics-bind", "127.0.0.1:99999")
    assert "--tls-cert is required" in usage_error(capsys, "serve")
    assert "--tls-key" in usage_error(capsys, "serve", "--tls-cert", __file__)
    missing = str(tmp_path / "none.pem")
    assert missing in usage_error(capsys, "serve", "--tls-cert", missing)
    assert "--namespace is required" in usage_error(capsys, "serve", "--self-signed")
    both = ("serve", "--self-signed", "--tls-cert", __file__)
    assert "not together" in usage_error(capsys, *both)
    assert "--level" in usage_error(capsys, "inject", "-f", "-", "--level", "high")
    for version in ("new", "1", "1.x", "1." + "9" * 5000):
        assert "1.29" in usage_error(capsys, "inject", "-f", "-", "--kubernetes", version)
    assert "HOST:PORT" in usage_error(capsys, "serve", "--bind", "127.0.0.1:" + "9" * 5000)
    assert "--file" in usage_error(capsys, "inject")
    assert "COMMAND" in usage_error(capsys)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("portt: 1", "unknown key 'portt'; allowed keys: accelerators,"),
        ("port: 0", "key 'port': 0 is not 1-65535"),
        ("port: [1]", "key 'port'"),
        ("profile: root", "privileged, capabilities, unprivileged"),
        ("default-level: high", "privileged, baseline, restricted"),
        ("native-sidecar: maybe", "auto, true, false"),
        ("cpu-limit: none", "a CPU quantity"),
        ("memory-limit: 1Mi", "64Mi or more"),
        ("memory-request: 1Gi", "'memory-request' exceeds 'memory-limit'"),
        ("accelerators: tpu", "a list"),
        ("sidecar-command: sh -c x", "a list of words"),
        ("driver-root: relative", "an absolute path"),
        ("collectors: [a b]", "is not all, or some of pod, tcp, net, rtt,"),
        ("collectors: rtt,foo", "'rtt,foo' is not all, or some of pod, tcp, net, rtt,"),
        ("collectors: [rtt, foo]", "cgroup, rdma, netdev, gpu"),
        ("driver-root: /", "other than /"),
        ("driver-root: /a:b", "without a colon"),
        ("driver-root: /.", "other than /"),
        ("driver-root: /proc", "other than /"),
        ("driver-root: /dev/shm", "other than /"),
        ("driver-root: //usr/lib/x86_64-linux-gnu/", "other than /"),
        ("image: A//b", "an image such as"),
        ("cpu-limit: \u0662", "a CPU quantity"),
        ('sidecar-command: ["\\0"]', "a list of words"),
        ("dcgm-exporter: node:9400", "an address as http://$(KITTY_HOST_IP):9400/metrics"),
        ("dcgm-exporter: https://10.0.0.1:9400/metrics", "an address as http://"),
        ("dcgm-exporter: http://", "an address as http://"),
        ("dcgm-exporter: http://$(KITTY_NODE)/", "an address as http://"),
        ("dcgm-exporter: http://10.0.0.1:99999/", "an address as http://"),
        ("dcgm-exporter: http://[::1/", "an address as http://"),
        ("rtt-hook: none", "auto, tcp_rtt_estimator, tcp_ack_update_rtt, tcp_probe"),
        ("bind: 'a b'", "an IP address"),
        ("bind: here", "an IP address"),
        ("[]", "not a mapping"),
        ("a: b: c", "not YAML"),
        ("1: 2", "unknown key 1"),
    ],
)
def test_config_errors_name_the_key_and_what_it_may_hold(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    assert says in str(caught.value)
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert says in usage_error(capsys, "inject", "-f", "-", "--config", str(path))


def test_a_missing_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "none.yaml")
    assert path in usage_error(capsys, "inject", "-f", "-", "--config", path)


def test_config_values() -> None:
    config = parse_config(
        "image: mirror:5000/kitty-sidecar:1\nport: 9200\nnative-sidecar: true\n"
        "profile: capabilities\ndefault-level: baseline\naccelerators: [x.io/npu]\n"
        "collectors: net, process\nsidecar-command: [kitty-sidecar]\ndriver-root:\n"
        "dcgm-exporter: http://$(KITTY_HOST_IP):9400/metrics\n"
    )
    assert config == Config(
        image="mirror:5000/kitty-sidecar:1",
        port=9200,
        native_sidecar="true",
        profile=Profile.CAPABILITIES,
        default_level=Level.BASELINE,
        accelerators=frozenset({"x.io/npu"}),
        collectors=("net", "process"),
        sidecar_command=("kitty-sidecar",),
        dcgm_exporter="http://$(KITTY_HOST_IP):9400/metrics",
    )
    assert parse_config("") == Config()


TEMPLATE: dict[str, Any] = {
    "spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}
}


def workload(kind: str, spec: dict[str, Any], api: str = "apps/v1") -> dict[str, Any]:
    metadata = {"name": "w", "namespace": "ml"}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


JOB = {"template": TEMPLATE}
ROLES = {"Master": {"replicas": 1, "template": TEMPLATE}, "Worker": {"template": TEMPLATE}}
WORKLOADS: list[tuple[dict[str, Any], int]] = [
    (workload("Deployment", {"template": TEMPLATE}), 1),
    (workload("StatefulSet", {"template": TEMPLATE}), 1),
    (workload("Job", JOB, "batch/v1"), 1),
    (workload("CronJob", {"jobTemplate": {"spec": JOB}}, "batch/v1"), 1),
    (
        workload(
            "JobSet",
            {"replicatedJobs": [{"name": "a", "template": {"spec": JOB}}] * 2},
            "jobset.x-k8s.io/v1alpha2",
        ),
        2,
    ),
    (workload("PyTorchJob", {"pytorchReplicaSpecs": ROLES}, "kubeflow.org/v1"), 2),
    (workload("MPIJob", {"mpiReplicaSpecs": ROLES}, "kubeflow.org/v2beta1"), 2),
    (
        workload(
            "TrainingRuntime",
            {"template": {"spec": {"replicatedJobs": [{"name": "n", "template": {"spec": JOB}}]}}},
            "trainer.kubeflow.org/v1alpha1",
        ),
        1,
    ),
    (workload("TrainJob", {"podTemplateOverrides": [TEMPLATE], "trainer": {"image": "i"}}), 0),
    (
        workload(
            "RayCluster",
            {
                "headGroupSpec": {"template": TEMPLATE},
                "workerGroupSpecs": [{"template": TEMPLATE}, {"template": TEMPLATE}],
            },
            "ray.io/v1",
        ),
        3,
    ),
    (
        workload(
            "LeaderWorkerSet",
            {"leaderWorkerTemplate": {"leaderTemplate": TEMPLATE, "workerTemplate": TEMPLATE}},
            "leaderworkerset.x-k8s.io/v1",
        ),
        2,
    ),
    ({"apiVersion": "v1", "kind": "List", "items": [workload("Deployment", JOB)] * 2}, 2),
    ({"apiVersion": "v1", "kind": "PodList", "items": [{"kind": "Pod", **TEMPLATE}]}, 1),
    ({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "data": {"a": "b"}}, 0),
]


@pytest.mark.parametrize(("body", "pods"), WORKLOADS, ids=lambda value: str(value)[:60])
def test_every_pod_template_is_injected(
    body: dict[str, Any], pods: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps(body))
    assert main(["inject", "-f", str(path)]) == 0
    out, err = capsys.readouterr()
    after = yaml.safe_load(out)
    assert out.count("name: kitty\n") == pods
    assert out.count("shareProcessNamespace: true") == pods
    assert "kitty.k10s.dev/job: unknown" not in out
    if not pods:
        assert after == body
        assert "no pod template" in err


def test_a_template_belongs_to_the_job_of_its_workload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(yaml.safe_dump(workload("Job", JOB)))
    main(["inject", "-f", str(path)])
    template = yaml.safe_load(capsys.readouterr().out)["spec"]["template"]
    assert template["metadata"]["annotations"]["kitty.k10s.dev/job"] == "w"


def offline(
    body: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[dict[str, Any], str]:
    """One document as ``inject`` gives it back, and what it says on the way."""
    path = tmp_path / "document.json"
    path.write_text(json.dumps(body))
    assert main(["inject", "-f", str(path)]) == 0
    out, err = capsys.readouterr()
    result: dict[str, Any] = yaml.safe_load(out)
    return result, err


def named_by_server(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"metadata": {"generateName": "w-", "namespace": "ml"}}


def identity(template: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The annotated job, and how the sidecar learns it."""
    spec = template["spec"]
    (container,) = (c for c in spec["containers"] if c["name"] == "kitty")
    env = {e["name"]: e for e in container["env"] if e["name"].startswith("KITTY_JOB")}
    how = {n: e["value"] if "value" in e else e["valueFrom"] for n, e in env.items()}
    return template["metadata"]["annotations"].get("kitty.k10s.dev/job"), how


def test_each_item_of_a_list_belongs_to_a_job_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, **TEMPLATE}
    wrapped = {"components": [{"template": workload("Job", JOB, "batch/v1")}]}
    wrapper = workload("AppWrapper", wrapped, "workload.codeflare.dev/v1beta2")
    wrapper["metadata"] = {"name": "outer"}
    deployment = workload("Deployment", JOB) | {"metadata": {"name": "d"}}
    body = {"apiVersion": "v1", "kind": "List", "items": [deployment, pod, wrapper]}
    after, err = offline(body, tmp_path, capsys)
    first, second, third = after["items"]
    inner = third["spec"]["components"][0]["template"]
    assert identity(first["spec"]["template"]) == ("d", {"KITTY_JOB": "d"})
    assert identity(second) == ("p", {"KITTY_JOB": "p"})
    assert identity(inner["spec"]["template"]) == ("w", {"KITTY_JOB": "w"})
    assert err == ""


CRON = {"jobTemplate": {"spec": JOB}}
GROUPS = {"leaderWorkerTemplate": {"workerTemplate": TEMPLATE}}
LATER: list[tuple[dict[str, Any], list[str], tuple[str, str]]] = [
    (
        named_by_server(workload("Job", JOB, "batch/v1")),
        ["template"],
        ("batch.kubernetes.io/job-name", ""),
    ),
    (
        workload("CronJob", CRON, "batch/v1"),
        ["jobTemplate", "spec", "template"],
        ("batch.kubernetes.io/job-name", ""),
    ),
    (
        workload("LeaderWorkerSet", GROUPS, "leaderworkerset.x-k8s.io/v1"),
        ["leaderWorkerTemplate", "workerTemplate"],
        ("leaderworkerset.sigs.k8s.io/group-index", "w-"),
    ),
    (
        workload("TrainingRuntime", {"template": {"spec": JOB}}, "trainer.kubeflow.org/v1alpha1"),
        ["template", "spec", "template"],
        ("jobset.sigs.k8s.io/jobset-name", ""),
    ),
    (
        named_by_server(workload("Job", {"tasks": JOB}, "batch.volcano.sh/v1alpha1")),
        ["tasks", "template"],
        ("volcano.sh/job-name", ""),
    ),
]


@pytest.mark.parametrize(
    ("body", "way", "told"), LATER, ids=[str(body["kind"]) for body, *_ in LATER]
)
def test_a_job_that_is_named_later_is_read_from_the_pods_label(
    body: dict[str, Any],
    way: list[str],
    told: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing that would be wrong for one of the pods is frozen in the template."""
    label, prefix = told
    after, err = offline(body, tmp_path, capsys)
    template = after["spec"]
    for key in way:
        template = template[key]
    assert identity(template) == (
        None,
        {
            "KITTY_JOB_LABEL": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}},
            "KITTY_JOB": f"{prefix}$(KITTY_JOB_LABEL)",
        },
    )
    (line,) = err.splitlines()
    assert line.endswith(f"kitty: job known at run time only, from the pod's label {label}")
    container = template["spec"]["containers"][-1]
    names = [entry["name"] for entry in container["env"]]
    assert names.index("KITTY_JOB_LABEL") < names.index("KITTY_JOB")


@pytest.mark.parametrize(
    "body",
    [
        named_by_server(workload("Deployment", JOB)),
        named_by_server(workload("LeaderWorkerSet", GROUPS, "leaderworkerset.x-k8s.io/v1")),
    ],
    ids=lambda body: body["kind"],
)
def test_a_job_that_nothing_names_is_left_out_and_asked_for(
    body: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after, err = offline(body, tmp_path, capsys)
    spec = after["spec"]
    template = spec.get("template") or spec["leaderWorkerTemplate"]["workerTemplate"]
    assert identity(template) == (None, {})
    assert "job not known offline: set the template's annotation kitty.k10s.dev/job" in err


def test_what_names_the_job_offline_wins_over_what_would_tell_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    annotated = copy.deepcopy(TEMPLATE)
    annotated["metadata"] = {"annotations": {"kitty.k10s.dev/job": "nightly"}}
    by_env = copy.deepcopy(TEMPLATE)
    by_env["spec"]["containers"][0]["env"] = [{"name": "JOB_NAME", "value": "llm"}]
    for template, job in ((annotated, "nightly"), (by_env, "llm")):
        spec = {"jobTemplate": {"spec": {"template": template}}}
        after, err = offline(workload("CronJob", spec, "batch/v1"), tmp_path, capsys)
        found = after["spec"]["jobTemplate"]["spec"]["template"]
        assert identity(found) == (job, {"KITTY_JOB": job})
        assert err == ""


def test_each_reason_is_said_in_the_same_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(metadata: dict[str, Any], **spec: Any) -> str:
        pod = {"kind": "Pod", "metadata": {"name": "a", **metadata}, "spec": spec}
        return offline(pod, tmp_path, capsys)[1]

    containers = TEMPLATE["spec"]["containers"]
    out = said({"labels": {"kitty.k10s.dev/inject": "false"}}, containers=containers)
    assert out == (
        'Pod/a: kitty: not injected (opted-out): label kitty.k10s.dev/inject is "false"\n'
    )
    assert said({}, containers=[]) == (
        "Pod/a: kitty: not injected (no-containers): the pod has no containers\n"
    )
    out = said({"annotations": {"kitty.k10s.dev/port": 9200}}, containers=containers)
    assert out == (
        "Pod/a: kitty: not injected (unreadable-pod): /metadata/annotations: the value of "
        "kitty.k10s.dev/port is no string, quote it\n"
    )


def test_what_holds_no_pods_is_called_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "several.yaml"
    path.write_text("kind: Secret\n---\n# empty\n---\na: b\n---\njust words\n")
    assert main(["inject", "-f", str(path)]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "Secret: holds no pod template, left as it is",
        f"{path}, document 3: no manifest, it has no kind; left as it is",
        f"{path}, document 4: no manifest, it has no kind; left as it is",
    ]


def test_a_missing_file_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "none")
    assert main(["inject", "-f", path]) == 1
    assert capsys.readouterr().err == f"kitty-webhook inject: {path}: No such file or directory\n"
    said = usage_error(capsys, "serve", "--config", path)
    assert said == f"kitty-webhook: config: {path}: No such file or directory\n"


def test_several_documents_anchors_and_dates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two containers that share one list by an anchor get one variable each, not two."""
    path = tmp_path / "w.yaml"
    path.write_text(
        """\
kind: Pod
metadata: {name: a, annotations: {date: 2024-01-01}}
spec:
  containers:
  - {name: a, image: i, env: &shared [{name: A, value: "1"}]}
  - {name: b, image: i, env: *shared}
---
kind: ConfigMap
---
# nothing
"""
    )
    assert main(["inject", "-f", str(path), "-f", str(path)]) == 0
    out = capsys.readouterr().out
    pod, _, _, *_ = yaml.safe_load_all(out)
    for container in pod["spec"]["containers"][:2]:
        assert [e["name"] for e in container["env"]] == ["A", "KITTY_WATCH"]
    assert "2024-01-01" in out


def test_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "pod.json"
    path.write_text(json.dumps({"kind": "Pod", "metadata": {"name": "a"}, **TEMPLATE}))
    with path.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["inject", "-f", "-"]) == 0
    assert "name: kitty" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["a: b: c", "!!python/object:os.system {}", "\x00"])
def test_what_is_no_manifest_is_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert main(["inject", "-f", str(path)]) == 1
    out, err = capsys.readouterr()
    assert str(path) in err
    assert out == ""
    assert main(["inject", "-f", str(tmp_path / "none")]) == 1


def test_help_says_everything(capsys: pytest.CaptureFixture[str], tls: Files) -> None:
    out = ""
    for command in ("serve", "inject", "check"):
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
        out += (one := capsys.readouterr().out)
        _, _, keys = one.partition("keys of the configuration file, each optional:\n")
        assert [line.split()[0] for line in keys.splitlines() if re.match("  [a-z]", line)] == [
            *_KEYS
        ]
        for text in ("all, or some of pod, tcp,", "(default: 320Mi)", "(default: privileged)"):
            assert text in keys
        assert max(map(len, keys.splitlines())) <= 79
    for word in ("/mutate/restricted", "--self-signed", "--metrics-bind", "--json", "--level"):
        assert word in out


def test_texts_stay_texts_for_kubectl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Go's YAML takes more for numbers and truths than the library that writes it here."""
    texts = ["1e3", "1E5", "+1e2", "0o14", "0x1F", ".5", "1_000", "y", "N", "no", "~", "12:30", "="]
    pod = {"kind": "Pod", **copy.deepcopy(TEMPLATE)}
    pod["spec"]["containers"][0]["args"] = texts
    path = tmp_path / "pod.json"
    path.write_text(json.dumps(pod))
    assert main(["inject", "-f", str(path)]) == 0
    out = capsys.readouterr().out
    assert yaml.safe_load(out)["spec"]["containers"][0]["args"] == texts
    for text in texts:
        assert f"    - '{text}'\n" in out


@pytest.mark.parametrize("value", ["!!binary AAEC", "!!set {a, b}"])
def test_what_json_cannot_hold_is_refused_not_mangled(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(f"kind: ConfigMap\nx: {value}\n")
    assert main(["inject", "-f", str(path)]) == 1
    out, err = capsys.readouterr()
    assert "has no place in a manifest" in err
    assert out == ""


@pytest.mark.parametrize("documents", [1, 2000])
def test_a_reader_that_leaves_is_no_traceback(documents: int, tmp_path: Path) -> None:
    path = tmp_path / "pods.json"
    path.write_text("---\n".join([json.dumps({"kind": "ConfigMap"}) + "\n"] * documents))
    command = [str(BIN / "kitty-webhook"), "inject", "-f", str(path)]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(write)
    assert done.returncode == 1
    assert b"Error" not in done.stderr


def test_a_full_device_is_said_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(yaml.safe_dump(workload("Job", {"template": {"spec": {}}}, "batch/v1")))
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [str(BIN / "kitty-webhook"), "inject", "-f", str(file)],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 1
    assert b"kitty-webhook inject: [Errno 28] No space left on device" in done.stderr
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr

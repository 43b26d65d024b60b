"""The manifests render, are what the API knows, and select each pod once or not at all."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from itertools import combinations, product
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import sidecar
from webhook.cli import main

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "manifests"
FOLDERS = [MANIFESTS / "base", *sorted((MANIFESTS / "overlays").iterdir())]
VERSIONS = ("1.28", "1.29", "1.33")
OTHERS_GROUPS = ("cert-manager.io", "monitoring.coreos.com")
COMPONENTS = sorted(path.name for path in (MANIFESTS / "components").iterdir())
INJECT = "kitty.k10s.dev/inject"
ENFORCE = "pod-security.kubernetes.io/enforce"
NAME = "kubernetes.io/metadata.name"


OLDEST_KUBECTL = 22  # minor version; the kustomize of older ones does not know `labels`


@functools.cache
def why_not_rendered() -> str:
    """What is wrong with kubectl; empty where nothing."""
    if not shutil.which("kubectl"):
        return "kubectl is not there: nothing renders"
    said = subprocess.run(
        ["kubectl", "version", "--client", "--output=json"], capture_output=True, check=True
    ).stdout
    version = json.loads(said)["clientVersion"]
    if int(re.sub(r"\D", "", version["minor"])) < OLDEST_KUBECTL:
        return f"kubectl {version['gitVersion']} is too old to render: 1.{OLDEST_KUBECTL} can"
    return ""


def render(folder: Path) -> list[Json]:
    if reason := why_not_rendered():
        pytest.skip(reason)
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def combined(folder: Path, *components: str) -> list[Json]:
    """Return what a kustomization of a user's own makes of the base and these components."""
    beside = os.path.relpath(MANIFESTS, folder)
    own = {
        "resources": [f"{beside}/base"],
        "components": [f"{beside}/components/{name}" for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(own))
    return render(folder)


def one(documents: list[Json], kind: str) -> Json:
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(folder: Path, version: str) -> None:
    for document in render(folder):
        if document["apiVersion"].split("/")[0] not in OTHERS_GROUPS:
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_everything_carries_the_label_that_finds_it(folder: Path) -> None:
    for document in render(folder):
        labels = document["metadata"].get("labels", {})
        assert labels.get("app.kubernetes.io/part-of") == "kitty", document["metadata"]["name"]


def identity(document: Json) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


@pytest.mark.parametrize("pair", [*combinations(COMPONENTS, 2)], ids="+".join)
def test_components_can_be_combined(pair: tuple[str, str], tmp_path: Path) -> None:
    """Two together give what each overlay alone gives, except for what one of them takes away."""
    both = {identity(document): document for document in combined(tmp_path, *pair)}
    base = {identity(document): document for document in render(MANIFESTS / "base")}
    alone = [
        {identity(document): document for document in render(MANIFESTS / "overlays" / name)}
        for name in pair
    ]
    removed = base.keys() - (alone[0].keys() & alone[1].keys())
    assert both.keys() == (alone[0].keys() | alone[1].keys()) - removed
    for name, document in both.items():
        changed = [one[name] for one in alone if name in one and one[name] != base.get(name)]
        assert document == (changed[0] if changed else base[name])


def test_all_components_are_those_of_an_overlay() -> None:
    assert [folder.name for folder in FOLDERS[1:]] == COMPONENTS


def test_a_component_leaves_a_users_own_objects_alone(tmp_path: Path) -> None:
    own = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "own", "namespace": "x"}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    beside = os.path.relpath(MANIFESTS, tmp_path)
    kustomization = {
        "resources": ["own.yaml"],
        "components": [f"{beside}/components/prometheus-operator"],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    assert own in render(tmp_path)


def matches(selector: Json, labels: dict[str, str]) -> bool:
    """Decide as the API server does: NotIn holds where the key is absent."""
    for term in selector["matchExpressions"]:
        inside = labels.get(term["key"]) in term["values"]
        assert term["operator"] in ("In", "NotIn")
        if inside != (term["operator"] == "In"):
            return False
    return True


@pytest.mark.parametrize("of_namespace", [None, "true", "false", "other"])
@pytest.mark.parametrize("level", [None, "privileged", "baseline", "restricted", "unheard-of"])
def test_one_entry_or_none_takes_a_pod(of_namespace: str | None, level: str | None) -> None:
    entries = one(render(MANIFESTS / "base"), "MutatingWebhookConfiguration")["webhooks"]
    for of_pod, name in product(
        [None, "true", "false", "other"], ["team-a", "kube-system", "kitty-system"]
    ):
        namespace = {NAME: name}
        namespace |= {INJECT: of_namespace} if of_namespace else {}
        namespace |= {ENFORCE: level} if level else {}
        pod = {INJECT: of_pod} if of_pod else {}
        taken = [
            entry["clientConfig"]["service"]["path"]
            for entry in entries
            if matches(entry["namespaceSelector"], namespace)
            and matches(entry["objectSelector"], pod)
        ]
        wanted = name == "team-a" and (
            of_pod == "true" or (of_pod != "false" and of_namespace == "true")
        )
        known = level in ("privileged", "baseline", "restricted")
        assert taken == ([f"/mutate/{level}" if known else "/mutate"] if wanted else [])


def test_no_entry_stands_in_the_way_of_a_pod() -> None:
    entries = one(render(MANIFESTS / "base"), "MutatingWebhookConfiguration")["webhooks"]
    assert len(entries) == 8
    assert len({entry["name"] for entry in entries}) == 8
    for entry in entries:
        assert entry["failurePolicy"] == "Ignore"
        assert entry["timeoutSeconds"] == 2
        assert entry["sideEffects"] == "None"
        assert [rule["operations"] for rule in entry["rules"]] == [["CREATE"]]
        assert "caBundle" not in entry["clientConfig"]


def test_rights_are_few_and_by_name() -> None:
    documents = render(MANIFESTS / "base")
    rules = [rule for kind in ("Role", "ClusterRole") for rule in one(documents, kind)["rules"]]
    unnamed = [
        (rule["resources"], rule["verbs"]) for rule in rules if not rule.get("resourceNames")
    ]
    assert unnamed == [(["secrets"], ["create"]), (["nodes"], ["list"])]
    named = [(rule["resources"], rule["verbs"]) for rule in rules if rule.get("resourceNames")]
    assert named == [
        (["secrets"], ["get", "update"]),
        (["mutatingwebhookconfigurations"], ["get", "patch"]),
    ]
    assert not any("*" in [*rule["resources"], *rule["verbs"]] for rule in rules)


def test_with_cert_manager_no_secret_can_be_touched() -> None:
    documents = render(MANIFESTS / "overlays" / "cert-manager")
    assert not [document for document in documents if document["kind"] in ("Role", "RoleBinding")]
    (rule,) = one(documents, "ClusterRole")["rules"]
    assert (rule["resources"], rule["verbs"]) == (["nodes"], ["list"])
    (container,) = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert "--self-signed" not in container["args"]
    secret = one(documents, "Certificate")["spec"]["secretName"]
    volumes = one(documents, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert secret in [volume.get("secret", {}).get("secretName") for volume in volumes]


@pytest.mark.parametrize("page", ["webhook.md", "pods.md"])
def test_the_offline_recipe_gives_what_is_installed(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / page).read_text()
    recipes = re.findall(r"^kitty-webhook (inject -f job\.yaml .*) \|", text, re.MULTILINE)
    settings = one(render(MANIFESTS / "base"), "ConfigMap")["data"]["config.yaml"]
    (tmp_path / "config.yaml").write_text(settings)
    template = {"spec": {"containers": [{"name": "trainer", "image": "t"}]}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "llm"}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job | {"spec": {"template": template}}))
    (recipe,) = (words.split() for words in recipes)
    words = [str(tmp_path / word) if word.endswith(".yaml") else word for word in recipe]
    assert main(words) == 0
    pod = yaml.safe_load(capsys.readouterr().out)["spec"]["template"]
    (container,) = pod["spec"]["initContainers"]
    assert container["image"] == f"localhost/kitty-sidecar:{sidecar.__version__}"
    assert container["securityContext"]["privileged"] is True
    assert pod["metadata"]["annotations"]["kitty.k10s.dev/job"] == "llm"


def test_the_docs_name_the_limit_that_is_set() -> None:
    template = one(render(MANIFESTS / "base"), "Deployment")["spec"]["template"]
    limit = template["spec"]["containers"][0]["resources"]["limits"]["memory"]
    assert f"limit the container to {limit}." in (ROOT / "docs" / "webhook.md").read_text()


def test_images_are_those_that_are_built() -> None:
    documents = render(MANIFESTS / "base")
    (container,) = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"localhost/kitty-webhook:{sidecar.__version__}"
    settings = yaml.safe_load(one(documents, "ConfigMap")["data"]["config.yaml"])
    assert settings["image"] == f"localhost/kitty-sidecar:{sidecar.__version__}"


def relabelling() -> tuple[list[Json], list[Json]]:
    plain = yaml.safe_load((MANIFESTS / "components/prometheus/kitty-scrape.yaml").read_text())
    monitor = one(render(MANIFESTS / "overlays" / "prometheus-operator"), "PodMonitor")
    (entry,) = plain["scrape_configs"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert entry["honor_labels"] is endpoint["honorLabels"] is True
    assert entry["scrape_interval"] == endpoint["interval"] == "5s"
    return entry["relabel_configs"], endpoint["relabelings"]


def test_operator_and_plain_prometheus_relabel_alike() -> None:
    """The operator drops finished pods and sets namespace and pod by itself."""
    plain, operators = relabelling()
    own = ("__meta_kubernetes_pod_phase", "__meta_kubernetes_namespace")
    wanted = [
        {re.sub("_([a-z])", lambda m: m[1].upper(), key): value for key, value in rule.items()}
        for rule in plain
        if rule["source_labels"][0] not in (*own, "__meta_kubernetes_pod_name")
    ]
    assert operators == wanted


@pytest.mark.parametrize(
    ("joined", "address"),
    [
        (";10.0.0.7;19111", "10.0.0.7:19111"),
        (";fd00:10:244::7;19111", "[fd00:10:244::7]:19111"),
        (";::ffff:10.0.0.7;19111", "[::ffff:10.0.0.7]:19111"),
        ("kitty-metrics;10.0.0.7;9100", None),
        (";10.0.0.7;", None),
    ],
)
def test_hosts_pods_are_scraped_where_the_annotation_says(joined: str, address: str | None) -> None:
    """Prometheus anchors its expressions and joins the sources by semicolons."""
    rules = [rule for rule in relabelling()[0] if rule.get("target_label") == "__address__"]
    assert len(rules) == 2
    made = [
        found.expand(rule["replacement"].replace("$", "\\"))
        for rule in rules
        if (found := re.fullmatch(rule["regex"], joined))
    ]
    assert made == ([address] if address else [])


def squeezed(document: Json) -> Json:
    """Return it with each run of blanks as one: kustomize doubles the line ends of folded texts."""
    text = re.sub(r"(?:\\n| )+", " ", json.dumps(document))
    found: Json = json.loads(text)
    return found


def test_the_shipped_rules_are_those_of_the_one_file() -> None:
    source = (MANIFESTS / "rules" / "kitty.rules.yaml").read_text()
    rule = one(render(MANIFESTS / "overlays" / "prometheus-operator"), "PrometheusRule")
    assert squeezed(rule["spec"]) == squeezed(yaml.safe_load(source)), "run tools/prometheus-rule"
    (shipped,) = (
        document
        for document in render(MANIFESTS / "overlays" / "prometheus")
        if document["metadata"]["name"] == "kitty-rules"
    )
    assert shipped["data"] == {"kitty.rules.yaml": source}

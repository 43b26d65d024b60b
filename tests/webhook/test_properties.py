"""Any pod at all: the patch gives a valid pod that differs only where the contract says."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonpatch
import kubernetes_validate
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.webhook.podsecurity import violations
from tests.webhook.support import golden_pairs
from webhook.annotations import FIELDS, PREFIX
from webhook.config import Config
from webhook.decision import Decision, Origin, Plan, decide
from webhook.mutate import operations
from webhook.patch import apply
from webhook.pod import Pod
from webhook.profiles import Level, Profile

SCHEMA = "1.37"
SETTINGS = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

names = st.from_regex(r"[a-z]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
words = st.text(st.characters(codec="utf-8"), max_size=30)
quantities = st.sampled_from(["0", "1", "500m", "2", "64Mi", "320Mi", "8Gi", "1e3", "0.5"])
users = st.sampled_from([0, 1, 1000, 65534])


def maybe(**parts: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=parts)


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


env = st.lists(
    st.one_of(
        st.fixed_dictionaries({"name": one_of("A", "JOB_NAME", "KITTY_WATCH"), "value": words}),
        st.just({"name": "KITTY_WATCH", "value": "1"}),
        st.just({"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}),
    ),
    max_size=4,
)
resource_names = one_of("cpu", "memory", "nvidia.com/gpu", "nvidia.com/mig-1g.5gb")
resources = maybe(
    limits=st.dictionaries(resource_names, quantities, max_size=3),
    requests=st.dictionaries(resource_names, quantities, max_size=3),
    claims=st.just([{"name": "claim"}]),
)
ports = st.lists(
    st.fixed_dictionaries(
        {"containerPort": one_of(80, 9100, 9101, 19500)},
        optional={"protocol": one_of("TCP", "UDP")},
    ),
    max_size=3,
    unique_by=lambda port: (port["containerPort"], port.get("protocol")),
)
container_security = maybe(
    privileged=st.booleans(),
    runAsUser=users,
    runAsGroup=users,
    runAsNonRoot=st.booleans(),
    allowPrivilegeEscalation=st.just(False),
    capabilities=one_of({"drop": ["ALL"]}, {"add": ["SYS_ADMIN"]}),
    seccompProfile=one_of({"type": "RuntimeDefault"}, {"type": "Unconfined"}),
)
restricted_security = st.fixed_dictionaries(
    {
        "allowPrivilegeEscalation": st.just(False),
        "capabilities": st.just({"drop": ["ALL"]}),
        "runAsNonRoot": st.just(True),
        "seccompProfile": st.just({"type": "RuntimeDefault"}),
    },
    optional={"runAsUser": one_of(1000, 2000), "runAsGroup": users},
)


def container(name: str, security: Any, **more: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"name": st.just(name), "image": st.just("i"), "securityContext": security},
        optional={
            "env": st.one_of(env, st.none()),
            "ports": ports,
            "resources": resources,
            **more,
        },
    )


keys = st.one_of(
    st.sampled_from(sorted(FIELDS)).map(lambda name: PREFIX + name),
    one_of("a~b", "a/b", "~1", "kubectl.kubernetes.io/default-container", PREFIX + "status"),
)
values = st.one_of(
    words, one_of("true", "false", "9100", "capabilities", "main", "a,b", "1", "8Gi")
)
label_keys = one_of("app", "job-name", "a/b", PREFIX + "inject")
metadata = st.fixed_dictionaries(
    {"name": names},
    optional={
        "annotations": st.one_of(st.dictionaries(keys, values, max_size=6), st.none()),
        "labels": st.one_of(
            st.dictionaries(label_keys, words, max_size=3),
            st.none(),
        ),
        "ownerReferences": st.just(
            [{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "u"}]
        ),
    },
)


@st.composite
def pods(draw: st.DrawFn, *, admissible: bool = False) -> dict[str, Any]:
    """Pods that the API takes; with admissible those that the restricted level takes too."""
    unusual = st.integers(0, 9).map(lambda n: n == 9)
    taken = draw(st.lists(names, min_size=1, max_size=5, unique=True))
    if draw(unusual):
        taken[0] = "kitty"
    inits = draw(st.integers(0, len(taken) - 1))
    security = restricted_security if admissible else container_security
    more = [{"restartPolicy": st.just("Always")}] * inits + [{}] * (len(taken) - inits)
    made = [
        draw(container(name, security, **extra)) for name, extra in zip(taken, more, strict=True)
    ]
    hosts = st.just(False) if admissible else st.booleans()
    pod_user = one_of(1000) if admissible else users
    pod_non_root = st.just(True) if admissible else st.booleans()
    spec = draw(
        maybe(
            restartPolicy=one_of("Always", "OnFailure", "Never"),
            hostNetwork=hosts,
            hostPID=hosts,
            shareProcessNamespace=unusual.map(lambda refuse: not refuse),
            securityContext=st.one_of(
                maybe(
                    runAsUser=pod_user,
                    runAsNonRoot=pod_non_root,
                    seccompProfile=one_of({"type": "RuntimeDefault"}),
                ),
                st.none(),
            ),
            resources=maybe(limits=st.just({"cpu": "4"})),
            volumes=st.one_of(st.just([{"name": "kitty-driver", "emptyDir": {}}]), st.none()),
            os=unusual.map(lambda windows: {"name": "windows" if windows else "linux"}),
        )
    )
    if spec.get("hostPID") and spec.get("shareProcessNamespace"):
        del spec["shareProcessNamespace"]  # the API rejects both together
    spec["containers"] = made[inits:]
    if inits:
        spec["initContainers"] = made[:inits]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": draw(metadata), "spec": spec}


configs = st.builds(
    Config,
    profile=st.sampled_from(Profile),
    native_sidecar=one_of("auto", "true", "false"),
    driver_root=one_of(None, "/run/nvidia/driver"),
    dcgm_exporter=one_of(None, "http://$(KITTY_HOST_IP):9400/metrics"),
)
oldest = one_of(None, (1, 27), (1, 28), (1, 29), (1, 34))


def outcome(pod: Any, level: Level, config: Config, version: Any) -> tuple[Decision, list[Any]]:
    read = Pod.read(pod)
    decision = decide(read, level, config, origin=Origin(uid="u", namespace="ml"), oldest=version)
    return decision, json.loads(json.dumps(operations(read, decision, config)))


@SETTINGS
@given(
    st.one_of(
        st.tuples(pods(), st.just(Level.PRIVILEGED)),
        st.tuples(pods(admissible=True), st.just(Level.BASELINE)),
        st.tuples(pods(admissible=True), st.just(Level.RESTRICTED)),
        st.tuples(pods(), st.sampled_from(Level)),
    ),
    configs,
    oldest,
)
def test_any_pod(reviewed: tuple[dict[str, Any], Level], config: Config, version: Any) -> None:
    pod, level = reviewed
    untouched = copy.deepcopy(pod)
    decision, patch = outcome(pod, level, config, version)
    assert pod == untouched
    assert all(len(w) <= 120 and w.isprintable() for w in decision.warnings)

    after = jsonpatch.apply_patch(pod, patch)
    ours = copy.deepcopy(pod)
    apply(ours, patch)
    assert ours == after

    kubernetes_validate.validate(after, SCHEMA, strict=True)
    assert without_kitty(after, decision) == without_kitty(pod, decision)
    assert outcome(after, level, config, version)[1] == []
    if not violations(pod, level):
        assert not violations(after, level)
    if isinstance(decision.outcome, Plan):
        sidecar_is_well(after, decision.outcome)


def without_kitty(pod: dict[str, Any], decision: Decision) -> Any:
    """The pod less everything that the contract lets the webhook write."""
    pod = copy.deepcopy(pod)
    for kind, keep in (("annotations", {"job", "status", "port"}), ("labels", {"injected"})):
        own = {PREFIX + name for name in keep} | {"kubectl.kubernetes.io/default-container"}
        entries = pod["metadata"].get(kind) or {}
        pod["metadata"][kind] = {k: v for k, v in entries.items() if k not in own}
    if not isinstance(decision.outcome, Plan):
        return pod
    spec = pod["spec"]
    spec.pop("shareProcessNamespace", None)
    for kind in ("containers", "initContainers"):
        spec[kind] = [c for c in spec.get(kind) or [] if c["name"] != "kitty"]
        for c in spec[kind]:
            marked = c["name"] in {u.name for u in decision.outcome.unmarked}
            mark = {"name": "KITTY_WATCH", "value": "1"}
            c["env"] = [e for e in c.get("env") or [] if not (marked and e == mark)]
    volumes = spec.get("volumes") or []
    spec["volumes"] = [v for v in volumes if not v["name"].startswith("kitty-driver")]
    return pod


def sidecar_is_well(after: dict[str, Any], plan: Plan) -> None:
    spec = after["spec"]
    where = spec["initContainers"] if plan.native else spec["containers"]
    sidecar = where[-1]
    assert sidecar["name"] == "kitty"
    assert plan.native or len(where) > 1
    assert (sidecar.get("restartPolicy") == "Always") is plan.native
    assert not {"startupProbe", "readinessProbe", "livenessProbe"} & set(sidecar)
    assert ("ports" in sidecar) is not bool(spec.get("hostNetwork"))
    assert not (spec.get("hostPID") and spec.get("shareProcessNamespace"))
    others = [c for kind in ("containers", "initContainers") for c in spec.get(kind) or []]
    declared = [
        port["containerPort"]
        for c in others
        for port in c.get("ports") or []
        if port.get("protocol", "TCP") == "TCP" and c["name"] != "kitty"
    ]
    assert plan.port not in declared
    assert json.loads(after["metadata"]["annotations"][PREFIX + "status"])["port"] == plan.port


@pytest.mark.parametrize("pair", golden_pairs(), ids=lambda pair: pair.name)
def test_golden_pods_stay_admissible_and_valid(pair: Any) -> None:
    level = pair.level or Level.PRIVILEGED
    assert not violations(pair.pod, level)
    assert not violations(pair.after, level)
    kubernetes_validate.validate(pair.after, SCHEMA, strict=True)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 99999) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
spec_keys = one_of(
    "containers", "initContainers", "hostNetwork", "securityContext", "os", "volumes", "resources"
)
container_keys = one_of("name", "env", "ports", "resources", "securityContext", "restartPolicy")


@SETTINGS
@given(
    st.fixed_dictionaries(
        {"kind": st.just("Pod")},
        optional={
            "metadata": json_values
            | st.dictionaries(one_of("labels", "annotations", "name"), json_values, max_size=3),
            "spec": json_values
            | st.dictionaries(spec_keys, json_values, max_size=4)
            | st.fixed_dictionaries(
                {"containers": st.lists(st.dictionaries(container_keys, json_values), max_size=3)}
            ),
        },
    ),
    st.sampled_from(Level),
)
def test_any_json_is_decided_on_or_named_unreadable(pod: Any, level: Level) -> None:
    """No other exception comes out; a patch can always be applied."""
    from webhook.pod import UnreadablePodError  # noqa: PLC0415 -- beside its only use

    try:
        _, patch = outcome(pod, level, Config(driver_root="/d"), (1, 34))
    except UnreadablePodError:
        return
    jsonpatch.apply_patch(pod, patch)

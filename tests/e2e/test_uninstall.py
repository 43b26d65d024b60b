"""What is left of kitty when it is removed: the pods that it was in."""

from __future__ import annotations

from collections.abc import Callable

from tests.e2e.install import CONFIGURATION, Install
from tests.e2e.kube import PREFIX, SYSTEM, Kube, all_ready, job_of, outcome, pod_of, sidecars

KINDS = (
    "namespaces,clusterroles,clusterrolebindings,priorityclasses,mutatingwebhookconfigurations,"
    "validatingwebhookconfigurations,customresourcedefinitions"
)


def test_nothing_is_left_and_running_jobs_go_on(
    install: Install, kube: Kube, namespace: Callable[..., str], trainer_image: str
) -> None:
    home = namespace("uninstall")
    kube.kubectl("label", "namespace", home, f"{PREFIX}inject=true")
    script = "import os, time\nwhile not os.path.exists('/tmp/stop'): time.sleep(0.1)"
    job = job_of(pod_of("llm", ["python3", "-c", script], image=trainer_image))
    kube.api.create(f"/apis/batch/v1/namespaces/{home}/jobs", job)
    kube.wait("the job's pod", lambda: [p for p in kube.pods(home) if all_ready(p)])
    (before,) = kube.pods(home)
    assert sidecars(before)

    install.remove()

    assert not kube.exists(CONFIGURATION)
    assert not kube.exists(f"/api/v1/namespaces/{SYSTEM}")
    selector = "app.kubernetes.io/part-of=kitty"
    assert kube.kubectl("get", KINDS, "-l", selector, "-o", "name").strip() == ""
    assert "kitty-webhook" not in kube.kubectl("get", KINDS, "-o", "name")
    made = kube.try_pod(home, pod_of("after", ["true"], image="after"))
    assert not sidecars(made)

    (after,) = kube.pods(home)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    states = [state["restartCount"] for state in after["status"]["containerStatuses"]]
    assert set(states) == {0}
    assert all_ready(after)
    kube.execute(home, after["metadata"]["name"], "touch /tmp/stop")
    path = f"/apis/batch/v1/namespaces/{home}/jobs/llm"
    ended = kube.wait("the end of the job", lambda: outcome(kube.api.get(path)))
    assert ended[0] == "Complete"

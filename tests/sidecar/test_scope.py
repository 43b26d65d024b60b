"""With hostPID, which of the machine's processes are the pod's."""

import pytest

from sidecar.sources.processes import of_pod

UID = "0a1b-22"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"/kubepods/burstable/pod{UID}/0123", True),
        ("/kubepods.slice/kubepods-pod0a1b_22.slice/cri-containerd-0123.scope", True),
        ("/kubepods/burstable/pod77/0123", False),
        ("/system.slice/sshd.service", False),
        ("/", False),
        ("", False),
        ("/../cri-containerd-0123.scope", True),
        ("/../cri-containerd-0123.scope/init.scope", True),
        ("/../..", False),
        ("/../../kubepods-pod77.slice/cri-containerd-0123.scope", False),
        ("/../kubepods-pod77.slice/cri-containerd-0123.scope", False),
        ("/../pod77/0123", False),
        ("/..", False),
    ],
)
def test_paths_of_the_pod(path: str, expected: bool) -> None:
    assert of_pod(path, UID) is expected

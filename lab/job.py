"""The training jobs of the lab: the pods that a PyTorchJob controller creates."""

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMESPACE = "training"
CONTAINER = "pytorch"
MASTER_PORT = 29500
SYSTEM_PYTHON = "/usr/bin/python3"  # PyTorch is Debian's
HERE = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What the ranks of a job run.

    Attributes:
        name: Of the job, and on the command line.
        command: Of a rank's container, from rank, world size and the address of rank 0.
        env: Its variables beside those of the controller.
        limits: What it asks for, as ``nvidia.com/gpu``.
        start_timeout_s: How long ranks may take until they are connected.
        missing: What this machine lacks for it, in a sentence; empty where nothing.
    """

    name: str
    command: Callable[[int, int, str], list[str]]
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 30.0
    missing: Callable[[], str] = str


def ring_command(_rank: int, _world: int, _master: str) -> list[str]:
    """Return the command of the lab's own trainer."""
    return ["python", "-m", "lab.trainer"]


def torch_command(rank: int, world: int, master: str) -> list[str]:
    """Return what ``torchrun`` is, with one rank in this pod.

    Standard output goes through the launcher: the PyTorch of Debian 12 cannot leave it alone
    under its Python (``--redirects 0`` fails).
    """
    launcher = [SYSTEM_PYTHON, "-m", "torch.distributed.run", "--redirects", "1", "--tee", "1"]
    place = ["--nnodes", str(world), "--node_rank", str(rank), "--nproc_per_node", "1"]
    meeting = ["--master_addr", master, "--master_port", str(MASTER_PORT)]
    return [*launcher, *place, *meeting, "-m", "lab.torch_trainer"]


def torch_missing() -> str:
    """Return why PyTorch cannot run here."""
    # Debian 13's launcher asks for a store by libuv, without which it was built, and fails.
    look = "from torch.distributed import TCPStore; TCPStore('127.0.0.1', 0, 1, True)"
    try:
        done = subprocess.run(
            [SYSTEM_PYTHON, "-c", look], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return f"there is no {SYSTEM_PYTHON}"
    if "No module named 'torch'" in done.stderr:
        return "PyTorch is not installed (Debian's python3-torch)"
    why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return f"this PyTorch launches nothing: {why}" if done.returncode else ""


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="ring", command=ring_command),
        Workload(
            name="torch",
            command=torch_command,
            env={
                "PYTHONPATH": str(HERE),
                "GLOO_SOCKET_IFNAME": "eth0",  # a pod's name resolves to nothing in the lab
                "OMP_NUM_THREADS": "1",
            },
            start_timeout_s=120.0,
            missing=torch_missing,
        ),
    )
}


def training_pod(rank: int, world: int, master: str, workload: Workload) -> dict[str, Any]:
    """Return the manifest of one rank's pod, as its controller sends it to the API server.

    Args:
        rank: 0 is the master, the others are workers.
        world: Number of ranks.
        master: Address of rank 0 (a headless service's name in a cluster).
        workload: What it runs.
    """
    name = workload.name
    role, index = ("master", 0) if rank == 0 else ("worker", rank - 1)
    env = {
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": master,
        "MASTER_PORT": str(MASTER_PORT),
        "WORLD_SIZE": str(world),
        "RANK": str(rank),
        **workload.env,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-{role}-{index}",
            "labels": {
                "kitty.k10s.dev/inject": "true",
                "training.kubeflow.org/job-name": name,
                "training.kubeflow.org/operator-name": "pytorchjob-controller",
                "training.kubeflow.org/replica-type": role,
                "training.kubeflow.org/replica-index": str(index),
            },
            "ownerReferences": [
                {
                    "apiVersion": "kubeflow.org/v1",
                    "kind": "PyTorchJob",
                    "name": name,
                    "uid": "0c0f8f0e-64a0-4b3f-8d7f-3d4c1f0f2a11",
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": CONTAINER,
                    "image": "kitty-lab-trainer",
                    "command": workload.command(rank, world, master),
                    "env": [{"name": key, "value": value} for key, value in env.items()],
                    "ports": [{"name": "pytorchjob-port", "containerPort": MASTER_PORT}],
                    **({"resources": {"limits": {**workload.limits}}} if workload.limits else {}),
                }
            ],
        },
    }

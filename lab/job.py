"""The training job of the demo: the pods that a PyTorchJob controller creates."""

from typing import Any

NAMESPACE = "training"
NAME = "ring"
CONTAINER = "pytorch"
MASTER_PORT = 29500


def training_pod(rank: int, world: int, master: str) -> dict[str, Any]:
    """Return the manifest of one rank's pod, as its controller sends it to the API server.

    Args:
        rank: 0 is the master, the others are workers.
        world: Number of ranks.
        master: Address of rank 0 (a headless service's name in a cluster).
    """
    role, index = ("master", 0) if rank == 0 else ("worker", rank - 1)
    env = {
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": master,
        "MASTER_PORT": str(MASTER_PORT),
        "WORLD_SIZE": str(world),
        "RANK": str(rank),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{NAME}-{role}-{index}",
            "labels": {
                "kitty.k10s.dev/inject": "true",
                "training.kubeflow.org/job-name": NAME,
                "training.kubeflow.org/operator-name": "pytorchjob-controller",
                "training.kubeflow.org/replica-type": role,
                "training.kubeflow.org/replica-index": str(index),
            },
            "ownerReferences": [
                {
                    "apiVersion": "kubeflow.org/v1",
                    "kind": "PyTorchJob",
                    "name": NAME,
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
                    "command": ["python", "-m", "lab.trainer"],
                    "env": [{"name": name, "value": value} for name, value in env.items()],
                    "ports": [{"name": "pytorchjob-port", "containerPort": MASTER_PORT}],
                }
            ],
        },
    }

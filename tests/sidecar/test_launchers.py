"""Trees of processes as real launchers make them, through the real agent.

mpirun, PyTorch's torchrun and Slurm are Debian's; Slurm is unpacked and not installed.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from lab.job import WORKLOADS
from tests.sidecar.sandbox import Page, Sandbox
from tests.sidecar.slurm import Slurm

WATCH = {"KITTY_WATCH": "1"}
TRAINER = "/usr/bin/python3 -c 'import os, time; os.fork() and os.fork(); time.sleep(60)'"
"""A trainer that forks two data-loader workers, without an exec."""


def settled(sandbox: Sandbox, ranks: list[str], watched: float) -> Page:
    """Waits until the sidecar sees so many processes, three of each rank; returns its page.

    A launcher's helpers come and go: the number alone can be right before all ranks have forked.
    """
    sandbox.sidecar()
    page = Page()

    def seen() -> bool:
        nonlocal page
        page = sandbox.scrape()
        return (
            sorted(page.label("kitty_rank_threads", "rank")) == ranks
            and sorted(page.label("proc_threads", "rank")) == ranks
            and page.values("kitty_watched_processes") == [watched]
            and page.values("kitty_rank_threads") == [3] * len(ranks)
            and page.values("kitty_rank_workers", state="S") == [2] * len(ranks)
        )

    sandbox.until(seen)
    return page


def test_mpirun(sandbox: Sandbox) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    command = [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-np",
        "2",
        "sh",
        "-c",
        f"exec {TRAINER}",
    ]
    sandbox.start(*command, env={**WATCH, "JOB_NAME": "mpi", "HOME": "/tmp"})
    page = settled(sandbox, ["0", "1"], 7.0)
    assert page.label("kitty_rank_threads", "job") == ["mpi", "mpi"]


def torchrun(sandbox: Sandbox, node: int, nodes: int, **env: str) -> None:
    """Starts what torchrun is, with two ranks."""
    if missing := WORKLOADS["torch"].missing():
        pytest.skip(missing)
    sandbox.start(
        *("/usr/bin/python3", "-m", "torch.distributed.run"),
        *("--nnodes", str(nodes), "--node_rank", str(node), "--nproc_per_node", "2"),
        *("--rdzv_id", "run-9", "--master_addr", "127.0.0.1", "--master_port", "29500"),
        # Debian 12's fails with the default of these under its Python.
        *("--redirects", "1", "--tee", "1"),
        *("--no_python", "sh", "-c", f"exec {TRAINER}"),
        env={**env, "OMP_NUM_THREADS": "1", "USE_LIBUV": "0", "HOME": "/tmp"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def test_torchrun(sandbox: Sandbox, tmp_path: Path) -> None:
    """The second of two nodes: the ranks are 2 and 3, the agent has none."""
    torchrun(sandbox, 0, 2, TMPDIR=str(tmp_path))  # another pod's
    torchrun(sandbox, 1, 2, TMPDIR=str(tmp_path), **WATCH)
    page = settled(sandbox, ["2", "3"], 7.0)
    assert set(page.label("kitty_rank_threads", "job")) == {"run-9"}


def test_torchrun_where_the_operator_sets_a_rank_of_the_pod(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    """Kubeflow sets RANK on the pod: the agent inherits it, and it is no rank of a worker's."""
    torchrun(sandbox, 0, 1, RANK="1", TMPDIR=str(tmp_path), **WATCH)
    settled(sandbox, ["0", "1"], 7.0)


def test_srun(sandbox: Sandbox, tmp_path: Path) -> None:
    """Tasks run beside the batch script, whose SLURM_PROCID is 0 and means nothing."""
    slurm = Slurm(sandbox, tmp_path)
    job = slurm.batch(tasks=3, command=f"sh -c {shlex.quote(f'exec {TRAINER}')}", env=WATCH)
    # Three trainers with two forks each, the script, srun and its second process.
    page = settled(sandbox, ["0", "1", "2"], 12.0)
    assert set(page.label("kitty_rank_threads", "job")) == {job}


def test_plain_forks_have_the_rank_of_the_pod(sandbox: Sandbox) -> None:
    sandbox.start("sh", "-c", f"exec {TRAINER}", env=WATCH)
    sandbox.sidecar(KITTY_RANK="6", KITTY_POD="p", KITTY_JOB="llm")
    sandbox.until(
        lambda: sandbox.scrape().values("kitty_rank_threads", rank="6", job="llm") == [3.0]
    )

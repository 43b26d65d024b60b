"""A cluster on one machine: starts pods from manifests and leaves nothing behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lab.cgroups import Cgroup, Hierarchy, hierarchies
from lab.commands import require_tools
from lab.leftovers import owned_name, run_directory, sweep
from lab.namespaces import Contained, Sandbox, private_network
from lab.network import GATEWAY, Link, make_bridge, plug_in, pod_address
from lab.podspec import (
    Manifest,
    Placement,
    UnsupportedError,
    command_line,
    containers_in_order,
    environment,
    quantity,
)

MARKER = "KITTY_LAB"  # in the environment of every process that a lab starts
ENTRYPOINTS = {"kitty-webhook": ["kitty-webhook"], "kitty-sidecar": ["kitty-sidecar"]}
SIDECAR = "kitty"
GRACE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A running pod.

    Attributes:
        name: Of the pod.
        manifest: What it was started from.
        placement: Its node, addresses and uid.
        sandbox: Its namespaces.
        link: Its cable to the bridge.
        cgroup: Parent of its containers' cgroups.
        containers: Its processes by container name.
        logs: Output of each container, by container name.
        helper_env: Environment for processes that are no container's.
    """

    name: str
    manifest: Manifest
    placement: Placement
    sandbox: Sandbox
    link: Link
    cgroup: Cgroup
    containers: dict[str, Contained]
    logs: dict[str, Path]
    helper_env: dict[str, str]

    def workload(self) -> list[str]:
        """Return the names of the containers that are not the sidecar."""
        return [name for name in self.containers if name != SIDECAR]

    def terminate(self) -> None:
        """Ask every container to end."""
        for container in self.containers.values():
            container.send(signal.SIGCONT)
            container.send(signal.SIGTERM)

    def log_tail(self, container: str, lines: int = 5) -> str:
        """Return the last lines that a container wrote."""
        text = self.logs[container].read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])


class Cluster:
    """Owns everything that a run makes; use it as a context manager, as root.

    Attributes:
        directory: For certificates and logs; removed at the end.
        notes: What this machine does not offer, one sentence each.
        swept: Names of dead owners whose remains were removed at the start.

    Args:
        node_env: What the container runtime of a node, by name, adds to the environment of every
            container there, as NVIDIA's does.
    """

    def __init__(self, *, node_env: Callable[[str], Mapping[str, str]] = lambda _: {}) -> None:
        self.directory = run_directory()
        self.notes: list[str] = []
        self.swept: list[str] = []
        self.pods: list[Pod] = []
        self._stack = ExitStack()
        self._cgroup = Cgroup([])
        self._node_env = node_env
        self._image_env = {
            "PATH": f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}",
            "TMPDIR": str(self.directory),  # what a killed container leaves goes with the rest
            MARKER: owned_name(),
        }

    def __enter__(self) -> Self:
        """Make the network, the cgroup and the directory.

        Raises:
            ToolError: A tool is missing or refused.
            OSError: The kernel refused.
        """
        require_tools()
        with ExitStack() as stack:
            trees = hierarchies()
            self.swept = sweep(tree.mount for tree in trees)
            self.directory.mkdir(mode=0o700)
            stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            self._make_cgroup(trees, stack)
            stack.enter_context(private_network())
            make_bridge()
            self._stack = stack.pop_all()
        return self

    def _make_cgroup(self, trees: tuple[Hierarchy, ...], stack: ExitStack) -> None:
        try:
            self._cgroup = Cgroup(trees, owned_name())
        except OSError as error:
            self.notes.append(f"pods run without cgroups: {error}")
            return
        stack.callback(self._cgroup.remove)
        if not any("cpu" in tree.controllers for tree in trees):
            self.notes.append("pods run without resource limits: no cgroup controller is writable")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the pods and remove what was made; signals wait until that is done."""
        numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        try:
            self._end_containers()
            self._stack.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _end_containers(self) -> None:
        for pod in self.pods:
            pod.terminate()
        deadline = time.monotonic() + GRACE_S
        for pod in self.pods:
            for container in pod.containers.values():
                if not container.wait(max(0.0, deadline - time.monotonic())):
                    container.send(signal.SIGKILL)
                    container.wait(GRACE_S)

    def next_address(self) -> str:
        """Return the address that the next pod gets."""
        return pod_address(len(self.pods))

    def start_pod(self, manifest: Manifest) -> Pod:
        """Start every container of a pod.

        Args:
            manifest: A pod with name and namespace, as the API server would store it.

        Raises:
            ToolError: A namespace or link could not be made.
            UnsupportedError: The manifest asks for what the lab does not do.
        """
        containers = containers_in_order(manifest)
        if len(containers) > 1 and not manifest["spec"].get("shareProcessNamespace"):
            raise UnsupportedError("containers that do not share the pod's PID namespace")
        number, name = len(self.pods), str(manifest["metadata"]["name"])
        cgroup = self._cgroup.child(name)
        sandbox = Sandbox(hostname=name, env=self._image_env, cgroup=cgroup.child("sandbox"))
        self._stack.callback(sandbox.close)
        link = plug_in(sandbox, number)
        placement = Placement(
            node=str(manifest["spec"].get("nodeName", "node")),
            pod_ip=link.address,
            host_ip=GATEWAY,
            uid=manifest["metadata"].get("uid") or str(uuid.uuid4()),
        )
        pod = Pod(
            name=name,
            manifest=manifest,
            placement=placement,
            sandbox=sandbox,
            link=link,
            cgroup=cgroup,
            containers={},
            logs={},
            helper_env=self._image_env,
        )
        self.pods.append(pod)
        for container in containers:
            self._start_container(pod, container)
        return pod

    def _start_container(self, pod: Pod, container: Mapping[str, Any]) -> None:
        name = str(container["name"])
        env = {
            **self._image_env,
            **self._node_env(pod.placement.node),
            **environment(pod.manifest, container, pod.placement),
        }
        cgroup = pod.cgroup.child(f"container-{name}")
        limits = container.get("resources", {}).get("limits", {})
        if "cpu" in limits:
            cgroup.limit_cpu(quantity(limits["cpu"]))
        if "memory" in limits:
            cgroup.limit_memory(int(quantity(limits["memory"])))
        pod.logs[name] = self.directory / f"{pod.name}.{name}.log"
        with pod.logs[name].open("wb") as output:
            pod.containers[name] = pod.sandbox.start(
                command_line(container, env, ENTRYPOINTS), env=env, cgroup=cgroup, output=output
            )

    def start_helper(self, *argv: str) -> subprocess.Popen[str]:
        """Start a process on the lab's network; it must end at end of its standard input."""
        return subprocess.Popen(
            argv,
            env=self._image_env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

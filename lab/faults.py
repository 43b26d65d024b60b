"""The faults: what can go wrong with one pod, each with a beginning and an end.

A fault is a context manager: entering starts it, leaving ends it. It touches one pod and leaves
the others alone. ``KINDS`` is the table of all.
"""

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lab.cgroups import Cgroup
from lab.cluster import Cluster, Pod
from lab.commands import ToolError, run
from lab.network import BRIDGE, MTU, wait_until_up
from lab.podspec import quantity
from lab.trainer import Settings

NFT_TABLE = "kitty_lab"
BATCH_BYTES = Settings.batch_bytes


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A row of the table.

    Attributes:
        name: On the command line.
        summary: What it does to the pod.
        strength: The usual strength.
        most: The greatest strength.
        unit: Of the strength.
        signals: Names of the signals (``lab.signals``) by which it must show.
        inject: Starts it on a pod with a strength.
    """

    name: str
    summary: str
    strength: float
    most: float
    unit: str
    signals: tuple[str, ...]
    inject: Callable[[Cluster, Pod, float], AbstractContextManager[None]]


def has_netem() -> bool:
    """Whether the kernel has the netem queue; tried on the lab's own bridge."""
    try:
        run("tc", "qdisc", "add", "dev", BRIDGE, "root", "netem", "delay", "1ms")
    except ToolError:
        return False
    run("tc", "qdisc", "del", "dev", BRIDGE, "root")
    return True


@contextmanager
def latency(cluster: Cluster, pod: Pod, delay_ms: float) -> Iterator[None]:
    """Hold back every frame that leaves the pod."""
    with netem_latency(pod, delay_ms) if has_netem() else relay_latency(cluster, pod, delay_ms):
        yield


@contextmanager
def netem_latency(pod: Pod, delay_ms: float) -> Iterator[None]:
    """Latency by the kernel's own queue."""
    queue = ("dev", "eth0", "root")
    pod.link.on_pod(
        "tc", "qdisc", "add", *queue, "netem", "delay", f"{delay_ms}ms", "limit", "100000"
    )
    try:
        yield
    finally:
        pod.link.on_pod("tc", "qdisc", "del", *queue)


@contextmanager
def relay_latency(cluster: Cluster, pod: Pod, delay_ms: float) -> Iterator[None]:
    """Latency by a relay of frames between the pod's link and the bridge."""
    near, far = f"{pod.link.port}near", f"{pod.link.port}far"
    run("ip", "link", "add", near, "mtu", str(MTU), "type", "veth", "peer", "name", far)
    with ExitStack() as stack:
        stack.callback(run, "ip", "link", "del", near)
        for name in (near, far):
            run("ip", "link", "set", name, "up", "mtu", str(MTU))
        for name in (near, far):
            wait_until_up(name)
        relay = cluster.start_helper(sys.executable, "-m", "lab.relay", pod.link.port, near)
        stack.callback(_end_helper, relay)
        _expect_ok(relay)
        pod.link.take_out_of_bridge(far)
        stack.callback(pod.link.put_back, far)
        _set_delay(relay, delay_ms)
        stack.callback(_set_delay, relay, 0)  # lets out what is held back before the link returns
        yield


def _set_delay(relay: "subprocess.Popen[str]", delay_ms: float) -> None:
    assert relay.stdin is not None
    relay.stdin.write(f"{delay_ms}\n")
    relay.stdin.flush()
    _expect_ok(relay)


def _expect_ok(relay: "subprocess.Popen[str]") -> None:
    assert relay.stdout is not None
    if relay.stdout.readline() != "ok\n":
        raise ToolError("the relay of frames ended")


def _end_helper(process: "subprocess.Popen[str]") -> None:
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=2)
    process.kill()
    process.wait()


@contextmanager
def loss(_cluster: Cluster, pod: Pod, percent: float) -> Iterator[None]:
    """Lose a share of the frames, in both directions."""
    with netem_loss(pod, percent) if has_netem() else nftables_loss(pod, percent):
        yield


@contextmanager
def netem_loss(pod: Pod, percent: float) -> Iterator[None]:
    """Loss by the kernel's own queue at both ends of the link."""
    ends = (("eth0", pod.link.on_pod), (pod.link.port, run))
    with ExitStack() as stack:
        for device, tool in ends:
            tool("tc", "qdisc", "add", "dev", device, "root", "netem", "loss", f"{percent}%")
            stack.callback(tool, "tc", "qdisc", "del", "dev", device, "root")
        yield


@contextmanager
def nftables_loss(pod: Pod, percent: float) -> Iterator[None]:
    """Loss where frames come in at either end: a drop on the way out would be noticed by TCP."""
    ends: tuple[tuple[str, Callable[..., str]], ...] = (
        ("eth0", pod.link.on_pod),
        (pod.link.port, run),
    )
    with ExitStack() as stack:
        for device, tool in ends:
            table = f"{NFT_TABLE}_{device}"
            tool(
                "nft",
                "-f",
                "-",
                stdin=f"table netdev {table} {{\n"
                "  chain incoming {\n"
                f"    type filter hook ingress device {device} priority 0\n"
                f"    numgen random mod 100000 < {round(percent * 1000)} counter drop\n"
                "  }\n"
                "}\n",
            )
            stack.callback(tool, "nft", "delete", "table", "netdev", table)
        yield


@contextmanager
def throttle(_cluster: Cluster, pod: Pod, mbit: float) -> Iterator[None]:
    """Bound the rate at which the pod sends."""
    queue = ("dev", "eth0", "root")
    shape = ("tbf", "rate", f"{mbit}mbit", "burst", "32kb", "limit", "4mb")
    pod.link.on_pod("tc", "qdisc", "add", *queue, *shape)
    try:
        yield
    finally:
        pod.link.on_pod("tc", "qdisc", "del", *queue)


@contextmanager
def contention(_cluster: Cluster, pod: Pod, busy: float) -> Iterator[None]:
    """Bind the trainer to one core, and run busy processes of the same container there too."""
    core = max(os.sched_getaffinity(0))
    with ExitStack() as stack:
        for thread in trainer_threads(pod):
            with suppress(ProcessLookupError):
                before = os.sched_getaffinity(thread)
                os.sched_setaffinity(thread, {core})
                stack.callback(_set_affinity, thread, before)
        for _ in range(round(busy)):
            hog = pod.sandbox.start(
                ["taskset", "--cpu-list", str(core), "sh", "-c", "while :; do :; done"],
                env=pod.helper_env,
                cgroup=training_cgroup(pod),
            )
            stack.callback(hog.wait, 2.0)
            stack.callback(hog.send, signal.SIGKILL)
        yield


def _set_affinity(thread: int, cores: set[int]) -> None:
    with suppress(ProcessLookupError):
        os.sched_setaffinity(thread, cores)


def training_cgroup(pod: Pod) -> Cgroup:
    """Return the cgroup of the training container."""
    return pod.cgroup.child(f"container-{pod.workload()[0]}")


def trainer_processes(pod: Pod) -> list[int]:
    """Return the processes of the training containers, launchers and loaders included."""
    waiting = [pod.containers[name].pid for name in pod.workload()]
    processes = []
    while waiting:
        processes.append(waiting.pop())
        for task in Path(f"/proc/{processes[-1]}/task").glob("[0-9]*"):
            with suppress(FileNotFoundError, ProcessLookupError):
                waiting += [int(word) for word in (task / "children").read_text().split()]
    return processes


def trainer_threads(pod: Pod) -> list[int]:
    """Return the threads of ``trainer_processes``."""
    return [
        int(task.name)
        for process in trainer_processes(pod)
        for task in Path(f"/proc/{process}/task").glob("[0-9]*")
    ]


@contextmanager
def quota(_cluster: Cluster, pod: Pod, percent: float) -> Iterator[None]:
    """Bound the training container's processor time to a share of one core.

    Raises:
        ToolError: No cgroup with the cpu controller can be written.
    """
    cgroup = training_cgroup(pod)
    if not cgroup.has("cpu"):
        raise ToolError("quota: no cgroup hierarchy with the cpu controller can be written here")
    cgroup.limit_cpu(percent / 100)
    try:
        yield
    finally:
        cgroup.limit_cpu(_declared_cores(pod))


def _declared_cores(pod: Pod) -> float | None:
    (container,) = (c for c in pod.manifest["spec"]["containers"] if c["name"] == pod.workload()[0])
    cores = container.get("resources", {}).get("limits", {}).get("cpu")
    return None if cores is None else quantity(cores)


@contextmanager
def slow_input(_cluster: Cluster, pod: Pod, milliseconds: float) -> Iterator[None]:
    """Bound what the training container reads from storage, so that a batch takes this long.

    Raises:
        ToolError: The batches are on no block device, or no cgroup with the block I/O controller
            can be written.
    """
    cgroup = training_cgroup(pod)
    if not cgroup.has("blkio"):
        raise ToolError("slow-input: no cgroup hierarchy with the block I/O controller is here")
    device = device_of_batches(pod)
    cgroup.limit_reads(device, max(1, round(BATCH_BYTES * 1000 / milliseconds)))
    try:
        yield
    finally:
        cgroup.limit_reads(device, None)


def device_of_batches(pod: Pod) -> str:
    """Return major and minor number of the disk that a trainer's loader reads from.

    A limit counts by disk: a partition stands for the disk it is on.

    Raises:
        ToolError: No process of the trainer holds a file on a block device.
    """
    for process in trainer_processes(pod):
        with suppress(OSError):
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                status = descriptor.stat()
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                    number = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
                    block = Path(f"/sys/dev/block/{number}")
                    if (block / "partition").exists():
                        return (block.resolve().parent / "dev").read_text().strip()
                    if block.exists():
                        return number
    raise ToolError(
        "slow-input: the trainer's batches are on no block device: set TMPDIR to a folder on a disk"
    )


@contextmanager
def pause(_cluster: Cluster, pod: Pod, percent: float) -> Iterator[None]:
    """Stop the trainer's processes for this share of every second."""
    trainers = [pod.containers[name] for name in pod.workload()]
    below = [
        process
        for process in trainer_processes(pod)
        if process not in {trainer.pid for trainer in trainers}
    ]
    over = threading.Event()

    def send(number: signal.Signals) -> None:
        for trainer in trainers:
            trainer.send(number)
        for process in below:
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def alternate() -> None:
        while True:
            send(signal.SIGSTOP)
            if over.wait(min(percent, 100) / 100):
                return
            if percent < 100:
                send(signal.SIGCONT)
                if over.wait(1 - percent / 100):
                    return

    thread = threading.Thread(target=alternate, name="pause")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        send(signal.SIGCONT)


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            name="latency",
            summary="frames leave the pod later",
            strength=50,
            most=10_000,
            unit="ms",
            signals=("rtt",),
            inject=latency,
        ),
        Kind(
            name="loss",
            summary="frames to and from the pod are lost",
            strength=3,
            most=100,
            unit="%",
            signals=("retransmits",),
            inject=loss,
        ),
        Kind(
            name="throttle",
            summary="the pod sends no faster than this",
            strength=20,
            most=100_000,
            unit="Mbit/s",
            signals=("tx queue",),
            inject=throttle,
        ),
        Kind(
            name="cpu",
            summary="busy processes share the trainer's core",
            strength=5,
            most=64,
            unit="processes",
            signals=("run queue",),
            inject=contention,
        ),
        Kind(
            name="quota",
            summary="the container may use no more of a core",
            strength=5,
            most=100,
            unit="% of a core",
            signals=("throttled",),
            inject=quota,
        ),
        Kind(
            name="slow-input",
            summary="storage gives the loader a batch in no less than this",
            strength=600,
            most=60_000,
            unit="ms",
            signals=("storage wait",),
            inject=slow_input,
        ),
        Kind(
            name="pause",
            summary="SIGSTOP for this share of every second",
            strength=100,
            most=100,
            unit="%",
            signals=("stopped",),
            inject=pause,
        ),
    )
}

"""Puts the agent together: sources, collectors, sampler, server."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, NoReturn

import sidecar
from sidecar.collectors.anomaly import AnomalyCollector, Figure
from sidecar.collectors.cgroup import CgroupCollector
from sidecar.collectors.gpu import GpuCollector
from sidecar.collectors.kernel import KernelCollector
from sidecar.collectors.matrix import MatrixCollector
from sidecar.collectors.net import NetCollector
from sidecar.collectors.netdev import NetdevCollector
from sidecar.collectors.pod import PodCollector
from sidecar.collectors.process import ProcessCollector
from sidecar.collectors.rank import RankCollector
from sidecar.collectors.rdma import RdmaCollector
from sidecar.collectors.rtt import RttCollector
from sidecar.collectors.system import SystemCollector
from sidecar.collectors.tcp import TcpCollector
from sidecar.collectors.waiting import WaitingCollector
from sidecar.ebpf.loader import Loader
from sidecar.guard import Guard
from sidecar.lifecycle import Lifecycle
from sidecar.pod import Pod
from sidecar.sampler import Rounds, Sampler
from sidecar.sources.addresses import addresses
from sidecar.sources.cgroup_mounts import CgroupFS
from sidecar.sources.dcgm_exporter import DcgmExporter
from sidecar.sources.delays import DelayTable
from sidecar.sources.descriptors import DescriptorTable
from sidecar.sources.gpu_attribution import DeviceTable
from sidecar.sources.gpu_nvidia import nvidia
from sidecar.sources.maps import MapTable
from sidecar.sources.netdev import of_the_machine
from sidecar.sources.processes import ProcessTable
from sidecar.sources.procfs import ProcFS
from sidecar.sources.rdma import RdmaFS
from sidecar.sources.sockdiag import SockDiag
from sidecar.sources.sockets import SocketTable
from sidecar.sources.system import SystemFS
from sidecar.sources.trees import TreeTable
from sidecar.sources.waiting import WaitReader
from sidecar.web import application, listen

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from sidecar.collectors.base import Collector
    from sidecar.collectors.matrix import ByRank
    from sidecar.config import Config
    from sidecar.web import Server

LOG = logging.getLogger("kitty")


_M_MMAP_THRESHOLD = -3  # malloc.h

STRAY = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are meant for trainers: `pkill -USR1 python` finds the agent too."""


class Sources:
    """What the collectors share. Each is made once."""

    def __init__(self, config: Config, *, own_port: Callable[[], int]) -> None:
        proc = str(config.proc)
        procfs = ProcFS(proc)
        self.proc = proc
        self.pod = Pod(procfs, ProcessTable(procfs, pod_uid=config.pod_uid), config)
        self.descriptors = DescriptorTable(proc)
        self.system = SystemFS(proc)
        self.own_port = own_port
        self.ebpf = Loader(python=config.bcc_python, proc=proc, sys=str(config.sys))
        self.trees = TreeTable(
            procfs,
            DelayTable(procfs),
            view=lambda: self.pod.view,
            stats=lambda: self.pod.stats,
        )
        self.maps = MapTable(view=lambda: self.pod.view, proc=proc, sys=str(config.sys))
        self.cgroups = CgroupFS(proc)
        self.rdma = RdmaFS(str(config.sys))
        self.figures: dict[str, Figure] = {}
        self.round_trips: Callable[[], ByRank] = dict
        self.segments: Callable[[], ByRank] = dict
        self.sockets = SocketTable(
            SockDiag(),
            self.descriptors,
            view=lambda: self.pod.view,
            own_port=own_port,
            shared=of_the_machine(proc),
        )


def _gpu(sources: Sources) -> Collector | None:
    url = sources.pod.config.dcgm_exporter
    root = sources.pod.config.driver_root
    source = nvidia(DcgmExporter(url) if url else None, driver_root=root, proc=sources.proc)
    return GpuCollector(sources.pod, source, DeviceTable(sources.proc)) if source else None


def _rtt(sources: Sources) -> Collector:
    collector = RttCollector(
        sources.pod,
        sources.sockets,
        sources.ebpf,
        sources.cgroups,
        hook=sources.pod.config.rtt_hook,
        own_port=sources.own_port,
        proc=sources.proc,
    )
    sources.figures["rtt"] = Figure(collector.latest, least=0.005)
    sources.round_trips = collector.round_trips
    return collector


def _tcp(sources: Sources) -> Collector:
    collector = TcpCollector(sources.pod, sources.sockets)
    sources.figures["retransmits"] = Figure(collector.retransmitted, least=10, span=0.5)
    sources.segments = collector.segments
    return collector


def _waiting(sources: Sources) -> Collector:
    collector = WaitingCollector(sources.pod, WaitReader(sources.proc))
    sources.figures["stopped"] = Figure(collector.stopped, least=0.2, span=0.5)
    return collector


COLLECTORS: dict[str, Callable[[Sources], Collector | None]] = {
    "pod": lambda s: PodCollector(s.pod),
    "tcp": _tcp,
    "net": lambda s: NetCollector(s.pod, s.sockets, proc=s.proc),
    "rtt": _rtt,
    "kernel": lambda s: KernelCollector(s.pod, s.ebpf, s.cgroups, proc=s.proc),
    "system": lambda s: SystemCollector(s.pod, s.system, proc=s.proc),
    "process": lambda s: ProcessCollector(s.pod, s.descriptors, proc=s.proc),
    "rank": lambda s: RankCollector(s.pod, s.trees, s.maps),
    "matrix": lambda s: MatrixCollector(s.pod, round_trips=s.round_trips, segments=s.segments),
    "waiting": _waiting,
    # After those whose figures it watches.
    "anomaly": lambda s: AnomalyCollector(s.pod, s.figures),
    "cgroup": lambda s: CgroupCollector(s.pod, s.cgroups),
    "rdma": lambda s: RdmaCollector(s.pod, s.rdma, s.descriptors, s.sockets, proc=s.proc),
    "netdev": lambda s: NetdevCollector(s.pod, addresses=addresses, proc=s.proc),
    # Last: where a bound on series cuts, it is the least of a GPU's many rows that go.
    "gpu": _gpu,
}
"""Every collector, in the order in which a round runs them: the pod's processes come first, then
its sockets, which the others use. One line a collector; its name is that of its file."""


class Agent:
    """The running sidecar.

    Args:
        config: the settings.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._server: Server | None = None
        self._why_silent = ""
        self.sources = Sources(config, own_port=lambda: self.port)
        wanted = COLLECTORS.keys() if config.collectors is None else {"pod", *config.collectors}
        if "rtt" in wanted:
            wanted |= {"tcp"}  # which rank a connection belongs to
        made = [make(self.sources) for name, make in COLLECTORS.items() if name in wanted]
        self.rounds = tuple(Rounds(collector) for collector in made if collector is not None)
        self.sampler = Sampler(self.rounds)
        self.guard = Guard(self.rounds, job=lambda: self.sources.pod.view.job)

    @property
    def port(self) -> int:
        """The port served, 0 before `serve`."""
        return self._server.server_port if self._server else 0

    def serve(self) -> None:
        """Starts to listen and to sample, in threads of their own."""
        self.listen()
        self.sampler.start()
        if any(rounds.collector.name == "rank" for rounds in self.rounds):
            self.sources.maps.start()

    def listen(self) -> None:
        """Starts to listen, unless it does already or no socket can be had now."""
        if self._server is not None:
            return
        app = application(self.guard.collect, self.sources.pod, self.rounds)
        try:
            self._server = listen(app, bind=self.config.bind, port=self.config.port)
        except OSError as e:
            if str(e) != self._why_silent:
                LOG.warning("nothing can be served now: %s", e)
                self._why_silent = str(e)
            return
        threading.Thread(target=self._server.serve_forever, name="web", daemon=True).start()

    def close(self) -> None:
        """Stops sampling and listening, and detaches what collectors attached."""
        self.sources.maps.stop()
        self.sampler.stop()
        for rounds in self.rounds:
            if isinstance(rounds.collector, RttCollector | KernelCollector):
                rounds.collector.close()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def run(config: Config) -> NoReturn:
    """Runs until SIGTERM, or until an ordinary sidecar's peers have ended; exits with 0."""
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    for number in STRAY:
        signal.signal(number, signal.SIG_IGN)
    _give_back_large_buffers()
    agent = Agent(config)
    agent.serve()
    LOG.info(
        "kitty-sidecar %s: port %d, collectors %s",
        sidecar.__version__,
        agent.port,
        ", ".join(rounds.collector.name for rounds in agent.rounds),
    )
    lifecycle = Lifecycle(agent.sources.pod, config)
    pause = threading.Event()
    while not lifecycle.over():
        pause.wait(1)
        agent.listen()
    LOG.info("no watched process is left: leaving, so that the pod can end")
    # Python's own way out ends with 120 where nobody reads the log any more.
    os._exit(0)


def _give_back_large_buffers() -> None:
    """Lets buffers of 256 KiB and more go back to the system as soon as they are free.

    glibc (malloc/malloc.c) otherwise learns from the first such buffer to keep them all.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 18)


def _leave(number: int, frame: FrameType | None) -> None:
    """Exits at once with status 0: a sidecar that is told to go has not failed."""
    del number, frame
    os._exit(0)

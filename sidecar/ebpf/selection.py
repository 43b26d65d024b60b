"""Chooses the RTT hook: the first that attaches and delivers, with the reasons for the others."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from sidecar.ebpf import rtt
from sidecar.ebpf.loader import TRANSIENT, Loaded, Loader, PassedOver, Reason, Refused
from sidecar.sources.sockdiag import LISTEN, smoothed_rtt
from sidecar.sources.tcp_counters import unpack, vector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sidecar.sources.sockets import SocketSnapshot

LOG = logging.getLogger("kitty.rtt")

SILENT_DUMPS = 10
"""A hook that delivers nothing between so many socket dumps that show traffic is given up."""
RETRY_SECONDS = 60.0
PATIENCE_SECONDS = 20.0
"""With a loader, until round trips are polled for: half a second is usual."""
SETTLE_SECONDS = 5.0
"""How long containers that start get before their cgroups are looked for once more."""


class HookSelection:
    """Loads hooks in a thread of its own, and gives up one that stays silent.

    Args:
        load: loads eBPF programs.
        hook: `auto` or one of `rtt.HOOKS`.
        cgroups: returns the cgroup v2 directories of the containers that training runs in.
        snapshot: returns the latest socket dump, None without one.
        proc: root of procfs.
        clock: seconds, monotonic.

    Attributes:
        refused: why there is no hook at all; None while there is one, or one is being loaded.
    """

    def __init__(
        self,
        load: Loader,
        *,
        hook: str,
        cgroups: Callable[[], tuple[str, ...]],
        snapshot: Callable[[], SocketSnapshot | None],
        proc: str = "/proc",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._hook = hook
        self._visible_cgroups = cgroups
        self._snapshot = snapshot
        self._proc = proc
        self._clock = clock
        self.refused: Refused | None = None
        self._probe: rtt.RttProbe | None = None
        self._chosen: rtt.RttProbe | Refused | None = None
        self._passed_over: dict[str, PassedOver] = {}
        self._thread: threading.Thread | None = None
        self._started = 0.0
        self._looked = 0.0
        self._cgroups: tuple[str, ...] = ()
        self._attached: frozenset[int] = frozenset()
        self._host_network = rtt.in_host_network(proc=proc)
        self._told: SocketSnapshot | None = None
        self._ports: frozenset[int] = frozenset()
        self._traffic = 0
        self._silent = 0

    @property
    def passed_over(self) -> Mapping[str, PassedOver]:
        """The hooks that were tried and are not in use, by name."""
        return dict(self._passed_over)

    def probe(self) -> rtt.RttProbe | None:
        """The hook at work; None until the first one is loaded, or where none can be.

        While another one is being loaded the present one stays at work.
        """
        if self._thread is None:
            self._start(after=None)
        elif not self._thread.is_alive():
            if self._chosen is not None:
                self._take(self._chosen)
                self._chosen = None
            elif self._worth_another_try():
                self._start(after=None)
        elif self._polls_meanwhile():
            self._probe = rtt.PollingProbe(self._connections)
        return self._probe

    def watch(self, *, delivered: bool) -> None:
        """Keeps the hook's ports current, and gives it up where it is silent.

        Args:
            delivered: whether the latest read had samples.
        """
        snapshot = self._snapshot()
        if isinstance(self._probe, rtt.KernelProbe) and snapshot is not None:
            if self._host_network and snapshot is not self._told:
                self._tell_ports(self._probe, snapshot)
                self._told = snapshot
            self._check(self._probe, snapshot, delivered=delivered or self._probe.ran)

    def close(self) -> None:
        """Detaches."""
        if self._thread is not None:
            self._thread.join()
            self.probe()
        if self._probe is not None:
            self._probe.close()

    def _start(self, *, after: str | None) -> None:
        self._started = self._looked = self._clock()
        self._cgroups = self._visible_cgroups()
        self._attached = _identities(self._cgroups)
        self._thread = threading.Thread(
            target=self._run, args=(after,), name="rtt-loader", daemon=True
        )
        self._thread.start()

    def _run(self, after: str | None) -> None:
        try:
            self._chosen = self._choose(after)
        except Exception as error:
            LOG.exception("choosing a hook failed")
            self._chosen = Refused(Reason.ERROR, f"{type(error).__name__}: {error}")

    def _choose(self, after: str | None) -> rtt.RttProbe | Refused:
        scope = rtt.Scope.own(proc=self._proc, cgroups=self._cgroups)
        candidates = rtt.candidates(scope, hook=self._hook, after=after)
        result = self._load.load(candidates)[0] if candidates else None
        for over in result.passed_over if result is not None else ():
            self._pass_over(over)
        if isinstance(result, Loaded):
            self._passed_over.pop(result.name, None)
            LOG.info("hook %s is attached (loader peak %d MiB)", result.name, result.peak_kib >> 10)
            return rtt.KernelProbe(result)
        if self._hook in {rtt.AUTO, rtt.POLLING} and self._snapshot() is not None:
            because = f"{result.reason}: {result.detail}" if result is not None else "asked for"
            if not isinstance(self._probe, rtt.PollingProbe):
                LOG.warning("hook %s, smoothed figures only (%s)", rtt.POLLING, because)
            if result is not None and not result.passed_over:
                self._pass_over(PassedOver("ebpf", result.reason, result.detail))
            return rtt.PollingProbe(self._connections)
        needed = "socket dumps" if self._hook == rtt.POLLING else "a visible cgroup v2 directory"
        return result or Refused(Reason.UNSUPPORTED, f"{self._hook} needs {needed}")

    def _take(self, chosen: rtt.RttProbe | Refused) -> None:
        if isinstance(chosen, rtt.PollingProbe) and isinstance(self._probe, rtt.PollingProbe):
            return
        if self._probe is not None:
            self._probe.close()
        self._probe = None if isinstance(chosen, Refused) else chosen
        self._told, self._ports = None, frozenset()
        self.refused = chosen if isinstance(chosen, Refused) else None

    def _pass_over(self, over: PassedOver) -> None:
        if over.name not in self._passed_over:
            LOG.info("hook %s is passed over: %s: %s", over.name, over.reason, over.detail)
        self._passed_over[over.name] = over

    def _worth_another_try(self) -> bool:
        waited = self._clock() - self._started
        attached = self._probe.hook if isinstance(self._probe, rtt.KernelProbe) else ""
        if attached not in {"", "sock_ops"}:
            return False
        if self._hook in {rtt.AUTO, rtt.POLLING} and self._probe is None:
            return self._snapshot() is not None  # polling has become possible
        if self._hook in {rtt.AUTO, "sock_ops"} and self._containers_changed():
            return True
        if attached:
            return False
        reasons = {over.reason for over in self._passed_over.values()}
        if self.refused is not None:
            reasons.add(self.refused.reason)
        return waited > RETRY_SECONDS and not reasons.isdisjoint(TRANSIENT)

    def _polls_meanwhile(self) -> bool:
        """A loader that hangs is given up after a minute or two only."""
        waits = self._clock() - self._started > PATIENCE_SECONDS
        nothing = self._probe is None and self._hook == rtt.AUTO
        return waits and nothing and self._snapshot() is not None

    def _containers_changed(self) -> bool:
        """Containers start after the agent, and again: sock_ops is attached to their cgroups."""
        now = self._clock()
        if now - self._looked <= SETTLE_SECONDS:
            return False
        self._looked = now
        found = _identities(self._visible_cgroups())
        return bool(found) and found != self._attached

    def _tell_ports(self, probe: rtt.KernelProbe, snapshot: SocketSnapshot) -> None:
        ports = frozenset(
            rtt.local_port(sock.key) for sock in snapshot.sockets if sock.key in snapshot.rank_of
        )
        if ports != self._ports:
            self._ports = ports
            probe.own_ports(ports)

    def _check(self, probe: rtt.KernelProbe, snapshot: SocketSnapshot, *, delivered: bool) -> None:
        traffic = sum(ranked.totals.delivered_bytes for ranked in snapshot.ranks.values())
        if delivered:
            self._silent = 0
        elif traffic > self._traffic:
            self._silent += 1
        self._traffic = traffic
        if self._silent > SILENT_DUMPS and self._hook == rtt.AUTO:
            self._silent = 0
            self._pass_over(PassedOver(probe.hook, Reason.SILENT, "attached, but delivers nothing"))
            self._start(after=probe.hook.rpartition(":")[2])

    def _connections(self) -> Iterator[tuple[bytes, int, int]]:
        snapshot = self._snapshot()
        if snapshot is None:
            return
        for sock in snapshot.sockets:
            if sock.state != LISTEN and sock.key in snapshot.rank_of:
                yield sock.key, smoothed_rtt(sock.info), unpack(vector(sock.info)).delivered_bytes


def _identities(directories: tuple[str, ...]) -> frozenset[int]:
    """Inode numbers: a path may lead through whatever process is there."""
    found = set()
    for directory in directories:
        with suppress(OSError):
            found.add(os.stat(directory).st_ino)
    return frozenset(found)

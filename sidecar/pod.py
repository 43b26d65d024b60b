"""The pod as the collectors see it: one reading of its processes, shared by all of a round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.attribution import PodView, attribute
from sidecar.sources.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.config import Config
    from sidecar.sources.processes import Process, ProcessTable
    from sidecar.sources.procfs import ProcFS, Stat


class Pod:
    """Holds the latest view; `refresh` replaces it, readers take it whole.

    Attributes:
        view: the latest view, empty before the first reading.
        config: the sidecar's settings, for the pod's own names.
        procfs: the files of its processes.
    """

    def __init__(self, procfs: ProcFS, table: ProcessTable, config: Config) -> None:
        self.procfs = procfs
        self.config = config
        self.view = PodView(job=config.job)
        self._table = table
        self._seen: tuple[Process, ...] = ()

    @property
    def stats(self) -> Mapping[int, Stat]:
        """The stat of each process as of the latest reading."""
        return self._table.stats

    def containers(self) -> dict[str, tuple[int, Mapping[str, str]]]:
        """Returns the containers that training runs in.

        Each with its oldest watched process and that one's control group by controller.
        """
        view = self.view
        found: dict[str, tuple[int, Mapping[str, str]]] = {}
        for pid in sorted(view.watched, key=lambda pid: (view.processes[pid].start, pid)):
            container = view.processes[pid].container
            if container not in found:
                try:
                    found[container] = (pid, self.procfs.cgroup(pid))
                except OSError:
                    continue
        return found

    def refresh(self) -> None:
        """Reads the processes.

        Raises:
            SourceError: /proc cannot be listed; the view is then empty, since what it knew may be
                gone.
            ExhaustedError: the agent has no descriptor left; the view stays.
        """
        try:
            processes = self._table.scan()
        except SourceError:
            self.view, self._seen = PodView(job=self.config.job), ()
            raise
        if processes != self._seen:
            self.view = attribute(processes, self.config, own_container=self._table.own_container)
            self._seen = processes

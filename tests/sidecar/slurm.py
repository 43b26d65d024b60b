"""A Slurm cluster of one node, from Debian's packages, inside a sandbox: nothing is installed.

Its daemons, ports, sockets and files are the sandbox's and a temporary folder's; they end with the
sandbox's first process. Slurm's own authentication is off: nobody else can reach the ports.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.sidecar.sandbox import ROOT, Sandbox

# Loopback addresses do not count as addresses when Slurm looks for the families that exist.
ADDRESS = "10.98.0.1"
NODE = "slurmbox"
CONFIG = """
ClusterName=test
SlurmctldHost={node}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/linear
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort=16817
SlurmdPort=16818
NodeName={node} NodeAddr={address} CPUs={cores} State=UNKNOWN
PartitionName=p Nodes={node} Default=YES State=UP OverSubscribe=FORCE
"""


class Slurm:
    """A running cluster.

    Args:
        sandbox: Where its daemons run.
        folder: For its configuration, state and logs.
    """

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        done = subprocess.run([ROOT / "tools/slurm"], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"no Slurm: {done.stderr.strip()}")
        self.unpacked = Path(done.stdout.strip())
        (libraries,) = self.unpacked.glob("usr/lib/*/slurm-wlm")
        self._sandbox, self._folder = sandbox, folder
        config = folder / "slurm.conf"
        config.write_text(
            CONFIG.format(
                node=NODE, address=ADDRESS, plugins=libraries, folder=folder, cores=os.cpu_count()
            )
        )
        self.env = {
            "SLURM_CONF": str(config),
            "LD_LIBRARY_PATH": f"{libraries}:{libraries.parent}",
            "TZ": "UTC",
        }
        probe = subprocess.run(
            [self.program("sbin/slurmctld"), "-V"],
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        if probe.returncode != 0:
            pytest.skip(f"Slurm does not run here: {probe.stderr.strip()}")
        sandbox.run("ip", "address", "add", f"{ADDRESS}/32", "dev", "lo")
        stepd = self.program("sbin/slurmstepd")
        for name, extra in (("slurmctld", ""), ("slurmd", f"-d {stepd}")):
            # Later ones load a plugin by the name that they were started as.
            daemon = folder / name
            daemon.symlink_to(self.program(f"sbin/{name}"))
            sandbox.start(
                *("unshare", "--uts", "sh", "-c"),
                f"hostname {NODE} && exec {daemon} -D {extra}",
                env=self.env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        sandbox.until(lambda: self.ask("sinfo", "-h", "-o", "%T") == "idle")

    def program(self, name: str) -> str:
        """The path of one of Slurm's programs, below usr; Debian 12 adds a suffix to daemons."""
        path = self.unpacked / "usr" / name
        return str(path if path.exists() else path.with_name(f"{path.name}-wlm"))

    def ask(self, name: str, *arguments: str, **env: str) -> str:
        """The output of one of Slurm's commands, empty while the cluster does not answer."""
        command = [*self._sandbox.enter, "timeout", "2", self.program(f"bin/{name}"), *arguments]
        return subprocess.run(
            command,
            env={"PATH": os.environ["PATH"], **self.env, **env},
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()

    def batch(self, *, tasks: int, command: str, env: dict[str, str]) -> str:
        """Submit a batch script that starts tasks by srun; the job's number.

        The submitter's environment is the script's, as sbatch does it unless told otherwise.
        """
        script = self._folder / "job.sh"
        srun = f"{self.program('bin/srun')} --overcommit -n {tasks} {command}"
        script.write_text(f"#!/bin/sh\n{srun}\n")
        options = ("--parsable", "-n", str(tasks), "-O", "-D", str(self._folder))
        answer = self.ask("sbatch", *options, str(script), **env)
        assert answer, "sbatch said nothing"
        return answer

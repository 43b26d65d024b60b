"""Rare kernel events of one pod: OOM kills and dropped packets, by raw tracepoint.

Sources: include/trace/events/oom.h (`mark_victim`), include/trace/events/skb.h (`kfree_skb`) and
include/net/dropreason-core.h of the Linux kernel.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sidecar.ebpf.loader import Attach, Candidate, Loaded

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, include/linux/proc_ns.h
_REASON_PREFIX = "SKB_DROP_REASON_"


def oom_candidate(*, proc: str = "/proc") -> Candidate | None:
    """The OOM program for the caller's PID namespace; None in the node's own.

    There (hostPID pods) every process of the node would count: use the cgroup's `oom_kill`.
    """
    namespace = os.stat(os.path.join(proc, "self/ns/pid")).st_ino
    if namespace == ROOT_PID_NAMESPACE:
        return None
    return Candidate(
        name="oom",
        source="oom.bpf.c",
        attach=(Attach("on_victim", "raw_tracepoint", "mark_victim"),),
        maps=("kills",),
        defines={"PIDNS_INO": namespace},
        offsets={
            "OFF_THREAD_PID": "task_struct.thread_pid",
            "OFF_LEVEL": "pid.level",
            "OFF_NUMBERS": "pid.numbers",
            "OFF_UPID_NS": "upid.ns",
            "OFF_PIDNS_INUM": "pid_namespace.ns.inum",
        },
        sizes={"UPID_SIZE": "upid"},
        arities={"ARGS": "mark_victim"},
    )


def drop_candidate(netns: int) -> Candidate:
    """The drop program for a network namespace (inode number); needs 5.17."""
    return Candidate(
        name="drops",
        source="drops.bpf.c",
        attach=(Attach("on_drop", "raw_tracepoint", "kfree_skb"),),
        maps=("drops",),
        defines={"NETNS": netns},
        offsets={
            "OFF_SK": "sk_buff.sk",
            "OFF_DEV": "sk_buff.dev",
            "OFF_SOCK_NET": "sock_common.skc_net.net",
            "OFF_DEV_NET": "net_device.nd_net.net",
            "OFF_INUM": "net.ns.inum",
        },
        arities={"ARGS": "kfree_skb"},
        enumerators={"FIRST_DROP": f"skb_drop_reason.{_REASON_PREFIX}NOT_SPECIFIED"},
        enums=("skb_drop_reason",),
    )


def read_oom_kills(loaded: Loaded) -> int:
    """Processes of the namespace chosen as OOM victims since the program was attached."""
    return int.from_bytes(loaded.maps["kills"].get(bytes(4)) or b"", "little")


def read_drops(loaded: Loaded) -> Mapping[str, int]:
    """Dropped packets by the kernel's name of the reason, without its common prefix.

    Reasons of a subsystem of their own have no name in the enum and appear as `REASON_<number>`.
    """
    names = {value: name for name, value in loaded.enums["skb_drop_reason"].items()}
    counts = {}
    for key, value in loaded.maps["drops"].items():
        reason = int.from_bytes(key, "little")
        name = names.get(reason, f"REASON_{reason}").removeprefix(_REASON_PREFIX)
        counts[name] = int.from_bytes(value, "little")
    return counts

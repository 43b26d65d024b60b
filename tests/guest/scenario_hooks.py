"""In the guest: what each RTT hook sees of 50 ms more delay, all of them at once.

Prints one JSON object; nothing is judged here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from sidecar.ebpf import lanes, loader, rtt
from tests.guest.network import PORT, Pair, enter

BUILD = Path("/lib/modules") / os.uname().release / "build"


def wrong_headers() -> None:
    """Puts headers where bcc looks for the kernel's, that no program compiles with."""
    for name in ("kconfig", "types", "version"):
        path = BUILD / "include" / "linux" / f"{name}.h"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#error wrong headers\n")


def window(probes: dict[str, rtt.KernelProbe], seconds: float) -> dict[str, list[float]]:
    """Count and mean (us) of each hook's samples in a window."""
    for probe in probes.values():
        probe.read()
    time.sleep(seconds)
    seen = {}
    for name, probe in probes.items():
        total = sum(growth for key, growth in probe.read() if rtt.local_port(key) != PORT)
        count = lanes.first(total)
        seen[name] = [count, lanes.second(total) / count if count else 0.0]
    return seen


def main() -> None:
    """Runs in the near namespace of a pair, so that its scope is that namespace's."""
    report: dict[str, object] = {"kernel": os.uname().release, "tracefs": _tracefs()}
    wrong_headers()
    pair = Pair("hooks")
    other = Pair("other")
    earlier = pair.start(pair.name, pair.ping())
    time.sleep(1)
    enter(pair.name)
    scope = rtt.Scope.own(cgroups=("/sys/fs/cgroup",))
    candidates = rtt.candidates(scope)
    began = time.monotonic()
    results = loader.Loader(deadline=120).load(*([candidate] for candidate in candidates))
    report["load_seconds"] = time.monotonic() - began
    report["refused"] = {
        candidate.name: [str(result.reason), result.detail]
        for candidate, result in zip(candidates, results, strict=True)
        if isinstance(result, loader.Refused)
    }
    probes = {
        result.name: rtt.KernelProbe(result)
        for result in results
        if isinstance(result, loader.Loaded)
    }
    report["peak_mib"] = max(r.peak_kib for r in results if isinstance(r, loader.Loaded)) >> 10
    report["earlier"] = window(probes, 2)  # only connections opened before the attach
    earlier.kill()
    pair.start(pair.name, pair.ping())
    other.start(other.name, other.ping())
    time.sleep(1)
    report["before"] = window(probes, 2)
    pair.shape("delay", "50ms")
    time.sleep(1)
    report["during"] = window(probes, 3)
    pair.shape()
    time.sleep(1)
    report["after"] = window(probes, 2)
    other.shape("delay", "50ms")
    time.sleep(1)
    report["elsewhere"] = window(probes, 2)
    report["raw"] = {name: probe.raw() for name, probe in probes.items()}
    report["lockdown"] = _under_lockdown(candidates)
    print(json.dumps(report))


def _tracefs() -> bool:
    return any(Path("/sys/kernel/tracing").iterdir())


def _under_lockdown(candidates: list[loader.Candidate]) -> dict[str, str]:
    """What becomes of the last two hooks once the kernel forbids reading its memory."""
    Path("/sys/kernel/security/lockdown").write_text("confidentiality")
    results = loader.Loader(deadline=120).load(*([candidate] for candidate in candidates[-2:]))
    return {
        candidate.name: "loaded" if isinstance(result, loader.Loaded) else str(result.reason)
        for candidate, result in zip(candidates[-2:], results, strict=True)
    }


if __name__ == "__main__":
    main()

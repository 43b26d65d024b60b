"""How long until /metrics shows a delay, and its end: the real agent, a wire that can delay.

`python bench/ebpf_latency.py [rounds]`, as root. This machine's kernel need not have netem: a
process with packet sockets is the wire between two network namespaces.
"""

from __future__ import annotations

import ctypes
import fcntl
import socket
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.sidecar.sandbox import Sandbox, inside  # noqa: E402 # needs the path above

if TYPE_CHECKING:
    from typing import TextIO

NEAR, FAR, PORT = "10.77.0.1", "10.77.0.2", 7000
DELAY_MS = 50
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17

WIRE = """
import heapq, select, socket, sys, time
ends = []
for name in ("near", "far"):
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
    end.bind((name, 0)); ends.append(end)
delay, queue, number = 0.0, [], 0
print("up", flush=True)
while True:
    wait = max(0, queue[0][0] - time.monotonic()) if queue else None
    for ready in select.select([sys.stdin, *ends], [], [], wait)[0]:
        if ready is sys.stdin:
            line = sys.stdin.readline()
            if not line: sys.exit()
            delay = float(line) / 1000; continue
        frame, address = ready.recvfrom(1 << 17)
        if address[2] == 4: continue  # our own, going out
        number += 1
        other = ends[1] if ready is ends[0] else ends[0]
        held = delay if ready is ends[0] else 0.0
        heapq.heappush(queue, (time.monotonic() + held, number, other, frame))
    while queue and queue[0][0] <= time.monotonic():
        _, _, other, frame = heapq.heappop(queue); other.send(frame)
"""
ANSWER = """
import socket, sys, threading
def answer(c):
    while d := c.recv(1 << 16): c.sendall(b".")
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print("up", flush=True)
    while True: threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()
"""
ASK = """
import socket, sys, time
c = socket.create_connection((sys.argv[1], int(sys.argv[2])))
c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
print("up", flush=True)
while True: c.sendall(b"x" * 1000); c.recv(1000); time.sleep(0.005)
"""


def main(rounds: int) -> int:
    """Prints the medians of both directions."""
    near, far, wire = Sandbox(), Sandbox(), Sandbox()
    try:
        for sandbox, name, address in ((near, "near", NEAR), (far, "far", FAR)):
            _plug(sandbox, wire, name, address)
        control = _up(wire.python(WIRE))
        _up(far.python(ANSWER, FAR, str(PORT)))
        _up(near.python(ASK, FAR, str(PORT), KITTY_WATCH="1", RANK="0"))
        near.sidecar(KITTY_COLLECTORS="pod,tcp,rtt")
        near.until(lambda: _gauge(near) is not None, seconds=60)
        time.sleep(1)
        before = _gauge(near)
        rises, falls, during = [], [], []
        for _ in range(rounds):
            rises.append(_until(near, control, DELAY_MS, 0.9 * DELAY_MS * 1000, 1e9))
            time.sleep(1)
            during.append(_gauge(near) or 0.0)
            falls.append(_until(near, control, 0, 0, 0.2 * DELAY_MS * 1000))
            time.sleep(1)
        hook = near.scrape().label("kitty_rtt_hook_info", "hook")
        print(f"latency: hook {hook}, {before:.0f} us, with {DELAY_MS} ms more "
              f"{statistics.median(during):.0f} us")  # fmt: skip
        for name, times in (("rise", rises), ("fall", falls)):
            print(f"latency: {name} after {statistics.median(times):.3f} s, worst {max(times):.3f}")
    finally:
        for sandbox in (near, far, wire):
            sandbox.close()
    return 0


def _plug(sandbox: Sandbox, wire: Sandbox, name: str, address: str) -> None:
    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    ends = ("netns", str(sandbox.init), "type", "veth", "peer", "name", name)
    ip("link", "add", "eth0", *ends, "netns", str(wire.init))
    sandbox.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
    sandbox.run("ip", "link", "set", "eth0", "up")
    wire.run("ip", "link", "set", name, "up")

    def whole_checksums() -> None:
        # A packet socket sees frames before a device would have filled their checksums in.
        setting = ctypes.create_string_buffer(struct.pack("II", ETHTOOL_STXCSUM, 0))
        request = struct.pack("16sP", b"eth0", ctypes.addressof(setting)).ljust(40, b"\0")
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, SIOCETHTOOL, request)

    inside(sandbox.init, whole_checksums)


def _up(process: subprocess.Popen[str]) -> TextIO:
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "up\n"
    return process.stdin  # type: ignore[return-value] # text=True


def _gauge(sandbox: Sandbox) -> float | None:
    values = sandbox.scrape().values("net_tcp_rtt_us")
    return values[0] if values else None


def _until(sandbox: Sandbox, control: TextIO, delay: int, low: float, high: float) -> float:
    control.write(f"{delay}\n")
    control.flush()
    began = time.monotonic()
    while not low <= (_gauge(sandbox) or -1.0) <= high:
        if time.monotonic() - began > 10:
            raise SystemExit("the gauge did not follow")
        time.sleep(0.01)
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10))

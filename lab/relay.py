"""A relay of Ethernet frames that holds each one back for a while: latency without netem.

It stands between two interfaces, as a longer cable would, and so the round trip that TCP measures
grows (a relay of TCP streams would end each connection and leave it as it was). Frames keep their
order. ``PACKET_VNET_HDR`` carries checksum and segmentation offloads across unchanged.

``python -m lab.relay NEAR FAR`` reads delays in milliseconds from standard input, one a line,
for frames that come in at NEAR; those from FAR pass at once. It answers ``ok`` when what was held
back under an older delay has left, and ends at end of file.
"""

import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress

SOL_PACKET = 263
PACKET_VNET_HDR = 15  # include/uapi/linux/if_packet.h
PACKET_IGNORE_OUTGOING = 23
ETH_P_ALL = 3
SO_RCVBUFFORCE = 33
FRAME_MAX = 10 + 14 + 4 + 65535 + 65535  # header of virtio_net, Ethernet, VLAN, a bundled segment
BATCH = 64


def open_port(interface: str) -> socket.socket:
    """Open a socket that receives what comes in at an interface and sends out of it."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 16 << 20)
    port.bind((interface, ETH_P_ALL))
    port.setblocking(False)
    return port


class Direction:
    """Frames on their way from one port to the other.

    Args:
        source: Where they come in.
        target: Where they go out.
    """

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.delay_s = 0.0
        self._source, self._target = source, target
        self._held: deque[tuple[float, bytes]] = deque()

    def take_in(self, now: float) -> None:
        """Take the waiting frames in; ``now`` is a monotonic time in seconds."""
        with suppress(BlockingIOError):
            for _ in range(BATCH):
                self._held.append((now + self.delay_s, self._source.recv(FRAME_MAX)))

    def let_out(self, now: float) -> None:
        """Send the frames whose time has come; one that the interface refuses is lost."""
        while self._held and self._held[0][0] <= now:
            frame = self._held.popleft()[1]
            with suppress(OSError):
                self._target.send(frame)

    def next_due(self) -> float | None:
        """Return when the oldest frame leaves; None when there is none."""
        return self._held[0][0] if self._held else None

    def let_all_out(self) -> None:
        """Send everything now, in order."""
        self.let_out(float("inf"))


def relay(near: socket.socket, far: socket.socket, control: socket.socket | int) -> None:
    """Pass frames on until ``control`` reaches end of file."""
    outward, inward = Direction(near, far), Direction(far, near)
    while True:
        now = time.monotonic()
        outward.let_out(now)
        inward.let_out(now)
        due = outward.next_due()
        wait = None if due is None else max(0.0, due - time.monotonic())
        ready, _, _ = select.select([near, far, control], [], [], wait)
        now = time.monotonic()
        if near in ready:
            outward.take_in(now)
        if far in ready:
            inward.take_in(now)
        if control in ready:
            line = sys.stdin.readline()
            outward.let_all_out()
            if not line:
                return
            outward.delay_s = float(line) / 1000
            print("ok", flush=True)


def main() -> int:
    """Relay between the two interfaces named on the command line."""
    near, far = (open_port(name) for name in sys.argv[1:3])
    with near, far:
        print("ok", flush=True)
        relay(near, far, sys.stdin.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The lab's network: one bridge, and a link for each pod that faults can be put on."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from lab.commands import ToolError, run
from lab.namespaces import Sandbox

BRIDGE = "kitty0"
MTU = 9000  # jumbo frames, as networks for training have
GATEWAY = "10.77.0.1"
PREFIX_LENGTH = 24


def make_bridge() -> None:
    """Make the bridge in the current network namespace; the lab itself answers at ``GATEWAY``."""
    run(
        "ip",
        "-batch",
        "-",
        stdin=f"link add {BRIDGE} mtu {MTU} type bridge\n"
        f"address add {GATEWAY}/{PREFIX_LENGTH} dev {BRIDGE}\n"
        f"link set {BRIDGE} up\n",
    )


@dataclass(frozen=True)
class Link:
    """The cable between a pod and the bridge.

    Attributes:
        port: Name of the end at the bridge, in the lab's namespace.
        address: IPv4 address of the pod's end, which is ``eth0`` in its namespace.
        on_pod: Runs a tool on the pod's network.
    """

    port: str
    address: str
    on_pod: Callable[..., str]

    def take_out_of_bridge(self, substitute: str) -> None:
        """Let another interface take this link's place at the bridge."""
        run("ip", "-batch", "-", stdin=_swap(self.port, substitute))

    def put_back(self, substitute: str) -> None:
        """Undo ``take_out_of_bridge``."""
        run("ip", "-batch", "-", stdin=_swap(substitute, self.port))


def _swap(leaving: str, entering: str) -> str:
    # In one batch: microseconds in which a frame is lost, as when a cable is moved.
    return f"link set {leaving} nomaster\nlink set {entering} master {BRIDGE}\n"


def wait_until_up(device: str, *, timeout_s: float = 5.0) -> None:
    """Wait until the kernel has noticed that a device has a carrier.

    It does so up to a second late, and until then a bridge drops what arrives at such a port.

    Raises:
        ToolError: The device is still not up after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while " state UP " not in run("ip", "-o", "link", "show", "dev", device):
        if time.monotonic() > deadline:
            raise ToolError(f"link {device} does not come up")
        time.sleep(0.01)


def pod_address(number: int) -> str:
    """Return the address of the pod with that number, from 0; the gateway's is the one before."""
    return f"10.77.0.{number + 2}"


def plug_in(sandbox: Sandbox, number: int) -> Link:
    """Connect a sandbox to the bridge.

    One frame carries one segment (``gso_max_segs``), as on a wire: what a fault drops or delays
    is then a segment and not a bundle of forty.
    """
    address, port = pod_address(number), f"port{number}"
    run(
        "ip",
        "-batch",
        "-",
        stdin=f"link add {port} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {sandbox.pid}\n"
        f"link set {port} master {BRIDGE} up\n",
    )
    sandbox.run_on_network(
        "ip",
        "-batch",
        "-",
        stdin=f"address add {address}/{PREFIX_LENGTH} dev eth0\n"
        "link set eth0 up gso_max_segs 1\n"
        f"route add default via {GATEWAY}\n",
    )
    wait_until_up(port)
    return Link(port=port, address=address, on_pod=sandbox.run_on_network)

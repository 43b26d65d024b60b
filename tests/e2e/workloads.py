"""What the pods of the tests run: Python programs for ``python3 -c``."""

SLEEP = "import time; time.sleep({seconds})"

# Its environment is changed after it started, which /proc/PID/environ does not show: the rank
# that the sidecar reports can come from the completion index alone.
RING = """
import os, sys, threading, time
sys.path.insert(0, "/trainer")
from lab import trainer
def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.1)
wait_for("/tmp/master")
os.environ["RANK"] = os.environ["JOB_COMPLETION_INDEX"]
os.environ["MASTER_ADDR"] = open("/tmp/master").read().strip()
settings = trainer.Settings.from_environment(os.environ)
threading.Thread(target=trainer.train, args=(settings,), daemon=True).start()
wait_for("/tmp/stop")
os._exit(0)
"""

# Kills the sidecar's agent and ends well once there is another one.
KILL_AGENT = """
import os, signal, sys, time
def agent():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().split(b"\\0")
        except OSError:
            continue
        if words[1:3] == [b"-m", b"sidecar"]:
            return int(pid)
def wait_for_agent_other_than(old):
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        found = agent()
        if found not in (None, old):
            return found
        time.sleep(0.2)
    sys.exit(f"no agent but {old}")
first = wait_for_agent_other_than(None)
time.sleep(2)
os.kill(first, signal.SIGKILL)
wait_for_agent_other_than(first)
time.sleep(2)
"""

# One TCP connection within the pod, in constant use.
TALK = """
import socket, time
listener = socket.create_server(("127.0.0.1", 0))
one = socket.create_connection(listener.getsockname())
other, _ = listener.accept()
while True:
    one.sendall(b"x" * 1000)
    left = 1000
    while left:
        left -= len(other.recv(left))
    other.sendall(b"y")
    one.recv(1)
    time.sleep(0.01)
"""

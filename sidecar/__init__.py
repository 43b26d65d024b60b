"""The agent in the pod: reads its own pod's GPU, /proc and eBPF signals and serves /metrics."""

__version__ = "0.1.0"

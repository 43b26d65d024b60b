"""The fault lab: pods of network and PID namespaces, a trainer, faults, and the demo."""

__version__ = "0.1.0"

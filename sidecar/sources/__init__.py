"""Readers of the kernel and the driver; they know nothing of Prometheus."""

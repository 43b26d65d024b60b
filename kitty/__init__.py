"""The operator's command line: what the verdict's rules say of the jobs in a Prometheus."""

__version__ = "0.1.0"

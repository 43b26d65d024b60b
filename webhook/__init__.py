"""One pod in, one patch out: the admission webhook that puts a kitty sidecar into training pods."""

__version__ = "0.1.0"

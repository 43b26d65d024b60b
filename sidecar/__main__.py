"""`python -m sidecar` is `kitty-sidecar`."""

from sidecar.cli import main

main()

"""`python -m sidecar` is `kitty-sidecar`."""

import sys

from sidecar.cli import main

sys.exit(main())

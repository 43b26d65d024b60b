"""The deployables carry one version, since each is released with the others."""

import kitty
import lab
import sidecar
import webhook


def test_one_version() -> None:
    assert webhook.__version__ == sidecar.__version__ == lab.__version__ == kitty.__version__

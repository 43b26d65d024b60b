"""Writes a file whole, or not at all."""

import os
import stat
import sys
import tempfile
from pathlib import Path

from kitty.prometheus import CannotTellError


def write(target: str, text: str) -> None:
    """Write text to a file by its name, or to standard output for ``-``.

    Raises:
        CannotTellError: It cannot be written.
    """
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        path = Path(os.path.realpath(target))  # what a link leads to, not the link
        if path.exists() and not path.is_file():  # a device, a pipe
            path.write_text(text, encoding="utf-8")
            return
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~_umask()
            os.chmod(part, mode)
            os.replace(part, path)
        except OSError:
            os.unlink(part)
            raise
    except OSError as error:
        raise CannotTellError(f"cannot write {target}: {error.strerror}") from error


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask

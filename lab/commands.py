"""Running the system's tools."""

import subprocess


class ToolError(RuntimeError):
    """A system tool is missing or refused; the text says which and why."""


def run(*argv: str, stdin: str = "") -> str:
    """Run a tool and return its output.

    Raises:
        ToolError: It is not installed or ended with an error.
    """
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,  # Ctrl-C must not end a tool half-way
        )
    except FileNotFoundError:
        raise ToolError(f"{argv[0]} is not installed") from None
    if done.returncode != 0:
        raise ToolError(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout

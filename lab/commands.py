"""Running the system's tools."""

import shutil
import subprocess

# By Debian package.
TOOLS = {
    "iproute2": ("ip", "tc"),
    "nftables": ("nft",),
    "util-linux": ("unshare", "nsenter", "taskset", "setpriv"),
}


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


def require_tools() -> None:
    """Look for every tool that a lab uses.

    Raises:
        ToolError: Some are missing; the text names them and the packages that have them.
    """
    missing = {
        package: [tool for tool in tools if shutil.which(tool) is None]
        for package, tools in TOOLS.items()
    }
    tools = [tool for names in missing.values() for tool in names]
    if tools:
        packages = ", ".join(package for package, names in missing.items() if names)
        raise ToolError(f"{', '.join(tools)} not found: install {packages}")

"""The command line's options and their forms."""

import argparse
import os
import re
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

from kitty import __version__

DEFAULT_URL = "http://127.0.0.1:9090"
DESCRIPTION = """\
Tells which rank of a training job is slow, and why: reads what kitty's rules recorded in a
Prometheus, and changes nothing.
"""
EPILOG = """\
environment:
  KITTY_PROMETHEUS  address of the Prometheus (default http://127.0.0.1:9090)
  KITTY_TOKEN       bearer token; --token-file FILE reads it from a file instead
  SSL_CERT_FILE     certificates to trust for https, beside none other
  NO_COLOR          no colour

exit status:
  0  the question was answered, a verdict or none
  1  it could not be told: no Prometheus, no data, no such job; one line says why
  2  wrong usage, or a job's name that is in several namespaces
"""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MOST_SINCE_S = 30 * 86400


class UsageError(Exception):
    """The command line is wrong; the text says why."""


def parser(environment: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="kitty", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw
    )
    top.add_argument("--version", action="version", version=f"kitty {__version__}")
    _server(top)
    url = environment.get("KITTY_PROMETHEUS") or DEFAULT_URL
    top.set_defaults(prometheus=url, token_file=None, timeout=30.0)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    jobs = commands.add_parser(
        "jobs", help="all jobs with their health", epilog=EPILOG, formatter_class=raw
    )
    job = commands.add_parser(
        "job",
        help="one job: the verdict, then each rank against the median",
        description="Tells the verdict on a job, then each rank's signals against the job's median,"
        " the worst first. A ! stands behind a figure that stands out.",
        epilog=EPILOG,
        formatter_class=raw,
    )
    report = commands.add_parser(
        "report",
        help="an HTML page to attach to a ticket",
        description="Writes one HTML file that needs no network: every signal by rank over the"
        " time, verdicts marked, and what was missing.",
        epilog=EPILOG,
        formatter_class=raw,
    )
    for command in (jobs, job, report):
        _server(command)
    for command in (job, report):
        command.add_argument(
            "name", metavar="NAME", type=name, help="the job, as kitty jobs lists it"
        )
        command.add_argument(
            "-n", "--namespace", type=name, help="its namespace, where there are several"
        )
    for command in (jobs, job):
        command.add_argument("--json", action="store_true", help="for machines, on stdout")
        command.add_argument(
            "--watch",
            metavar="SECONDS",
            nargs="?",
            type=seconds,
            const=5.0,
            help="again and again, until Ctrl-C (every 5 s)",
        )
    some = job.add_mutually_exclusive_group()
    some.add_argument(
        "--limit", metavar="RANKS", type=count, default=20, help="show the worst (default 20)"
    )
    some.add_argument("--all", action="store_true", help="show every rank")
    report.add_argument(
        "--since",
        metavar="TIME",
        type=span,
        default=3600,
        help="how far back: 90s, 15m, 1h, 1h30m, 2d; 1m to 30d (default 1h)",
    )
    report.add_argument(
        "-o", "--output", metavar="FILE", required=True, help="where to write it; - is stdout"
    )
    return top


def _server(command: argparse.ArgumentParser) -> None:
    """Add the options on the server, which may stand before the command or after it."""
    command.add_argument(
        "--prometheus",
        metavar="URL",
        type=address,
        default=argparse.SUPPRESS,
        help="address of the Prometheus",
    )
    command.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        default=argparse.SUPPRESS,
        help="holds a bearer token",
    )
    command.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=seconds,
        default=argparse.SUPPRESS,
        help="for each answer of the Prometheus (default 30)",
    )


def name(text: str) -> str:
    """Parse a name: what is not UTF-8 no label can be."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError("the name is not UTF-8") from error
    return text


def address(text: str) -> str:
    """Parse the address of a server."""
    try:
        parts = urllib.parse.urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or not text.isprintable() or " " in text or not text.isascii():
        raise argparse.ArgumentTypeError(f"{text!r} is not an address like {DEFAULT_URL}")
    if parts.username is not None:
        raise argparse.ArgumentTypeError("an address holds no password here: use KITTY_TOKEN")
    if parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"{text!r}: nothing follows the path of the address")
    return text


def seconds(text: str) -> float:
    """Parse a length of time in seconds, 1 to 3600."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to 3600")
    return value


def count(text: str) -> int:
    """Parse a number above 0."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 10**6):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def span(text: str) -> int:
    """Parse a length of time with units; seconds."""
    if re.fullmatch(r"(\d{1,9}[smhd])+", text, re.ASCII):
        total = sum(int(n) * UNITS[unit] for n, unit in re.findall(r"(\d+)([smhd])", text))
        if 60 <= total <= MOST_SINCE_S:
            return total
    raise argparse.ArgumentTypeError(f"{text!r} is not a time like 90s, 15m, 1h or 2d (1m to 30d)")


def token(file: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the bearer token, if there is one.

    Raises:
        UsageError: The file cannot be read, or the token is none.
    """
    if file is not None:
        try:
            text = file.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            told = getattr(error, "strerror", None) or "it holds other than ASCII"
            raise UsageError(f"--token-file {file}: {told}") from error
    else:
        text = environment.get("KITTY_TOKEN", "").strip()
        if not text:
            return None
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise UsageError("the token is empty, or holds blanks or other than printable ASCII")
    return text

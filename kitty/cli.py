"""The operator's command line."""

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Callable, Sequence

from rich.console import RenderableType
from rich.live import Live

from kitty.document import job_document, jobs_document
from kitty.history import read_history
from kitty.job import read_job
from kitty.jobs import NO_DATA, AmbiguousError, find_job, read_jobs
from kitty.options import UsageError, parser, token
from kitty.output import write
from kitty.page import page
from kitty.prometheus import CannotTellError, Prometheus
from kitty.tables import console, job_view, jobs_table
from kitty.text import clean, duration

DONE, UNTOLD, USAGE = 0, 1, 2
CLOCKS_DIFFER_S = 30

Answer = tuple[RenderableType | str, int]
"""What to print, and the exit status."""


def jobs(server: Prometheus, options: argparse.Namespace, at: float) -> Answer:
    """Answer `kitty jobs`."""
    found = read_jobs(server, at)
    if options.json:
        return json.dumps(jobs_document(found, at, server.warnings), allow_nan=False), DONE
    return jobs_table(found, at), DONE


def job(server: Prometheus, options: argparse.Namespace, at: float) -> Answer:
    """Answer `kitty job`."""
    namespace, name = find_job(server, at, name=options.name, namespace=options.namespace)
    snapshot = read_job(server, at, namespace=namespace, name=name)
    status = UNTOLD if snapshot.state.health == NO_DATA else DONE
    if options.json:
        return json.dumps(job_document(snapshot, server.warnings), allow_nan=False), status
    limit = None if options.all else options.limit
    screen = console()
    return (
        job_view(snapshot, limit=limit, width=screen.width, wrap=screen.is_terminal),
        status,
    )


def report(server: Prometheus, options: argparse.Namespace, at: float) -> Answer:
    """Answer `kitty report`."""
    namespace, name = find_job(
        server, at, name=options.name, namespace=options.namespace, window=f"{options.since}s"
    )
    history = read_history(server, at, namespace=namespace, name=name, since_s=options.since)
    write(options.output, page(history, warnings=server.warnings))
    return "", DONE


COMMANDS: dict[str, Callable[[Prometheus, argparse.Namespace, float], Answer]] = {
    "jobs": jobs,
    "job": job,
    "report": report,
}


def ask(server: Prometheus, options: argparse.Namespace) -> Answer:
    """Answer once, at the server's time."""
    server.warnings.clear()
    at = server.now()
    apart = time.time() - at
    if abs(apart) > CLOCKS_DIFFER_S:
        way = "ahead of" if apart > 0 else "behind"
        server.warnings.append(
            f"this machine's clock is {duration(abs(apart) // 10 * 10)} {way} the Prometheus's;"
            " all times here are the Prometheus's"
        )
    return COMMANDS[options.command](server, options, at)


def warn(server: Prometheus, told: set[str]) -> None:
    """Print warnings that were not told yet."""
    for warning in server.warnings:
        if warning not in told:
            print(f"kitty: warning: {warning}", file=sys.stderr)
    told.update(server.warnings)


def show(drawn: RenderableType | str) -> None:
    """Print an answer; text is printed as it is."""
    if isinstance(drawn, str):
        if drawn:
            print(drawn, flush=True)
    else:
        screen = console()
        # Printed by rich, a pipe that closes would end the program in a way of its own.
        with screen.capture() as captured:
            screen.print(drawn, crop=False)
        print(captured.get(), end="", flush=True)


def watch(server: Prometheus, options: argparse.Namespace) -> int:
    """Answer again and again until Ctrl-C; once there was an answer, also after the lack of one."""
    screen = console()
    live = None if options.json or not screen.is_terminal else Live(console=screen, screen=False)
    told: set[str] = set()
    answered = False
    if live is not None:
        live.start()
    try:
        while True:
            try:
                drawn, _ = ask(server, options)
            except CannotTellError as error:
                if not answered:
                    raise
                print(f"kitty: {error}", file=sys.stderr)
            else:
                answered = True
                warn(server, told)
                if live is not None and not isinstance(drawn, str):
                    live.update(drawn, refresh=True)
                else:
                    show(drawn)
            time.sleep(options.watch)
    finally:
        if live is not None:
            live.stop()


def run(options: argparse.Namespace) -> int:
    """Run a command; the exit status."""
    server = Prometheus(
        url=options.prometheus, token=token(options.token_file), timeout_s=options.timeout
    )
    if getattr(options, "watch", None):
        return watch(server, options)
    drawn, status = ask(server, options)
    warn(server, set())
    show(drawn)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 answered (a verdict or none), 1 it could not be told, 2 wrong usage.
    """
    options = parser().parse_args(argv)
    if sys.stderr is None:  # closed by the caller: print would turn to standard output
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 -- until the end
    if sys.stdout is None:
        print("kitty: standard output is closed", file=sys.stderr)
        return UNTOLD
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a table's line is not in every encoding
    try:
        return run(options)
    except (UsageError, AmbiguousError) as error:
        print(f"kitty: {error}", file=sys.stderr)
        return USAGE
    except CannotTellError as error:
        print(f"kitty: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return DONE if getattr(options, "watch", None) else 130
    except BrokenPipeError:
        # The reader has what it wants; nothing more may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:
        print(f"kitty: {clean(str(error))}", file=sys.stderr)
    return UNTOLD


if __name__ == "__main__":
    sys.exit(main())

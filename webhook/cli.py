"""The command line of the webhook: serve, inject, check."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from webhook import __version__
from webhook.config import Config, ConfigError, load_config
from webhook.profiles import Level

if TYPE_CHECKING:
    from collections.abc import Sequence

DONE, FAILED, USAGE = 0, 1, 2

_SERVE = """\
Serves admission reviews over TLS:
  POST /mutate                namespaces without a Pod Security enforce label
  POST /mutate/privileged     and one path for each level that a namespace may
  POST /mutate/baseline       enforce: the sidecar is never given more than the
  POST /mutate/restricted     level admits
On the metrics address: /metrics, /healthz, /readyz.
A certificate replaced on disk is served to the next connection."""

_INJECT = """\
Does offline what the webhook does at admission, to pods and to everything that
holds a pod template. Several documents a file; what holds no pod passes through
unchanged. The result goes to stdout as YAML, what was skipped to stderr."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 when done, 1 when it failed, 2 when it was asked the wrong way.
    """
    arguments = _parser().parse_args(argv)
    try:
        config = load_config(arguments.config)
    except ConfigError as error:
        print(f"kitty-webhook: config: {error}", file=sys.stderr)
        return USAGE
    if arguments.command == "serve":
        return _serve(arguments, config)
    from webhook.inject import inject_files  # noqa: PLC0415 -- serve does without it

    return inject_files(arguments.file, Level(arguments.level or config.default_level), config)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kitty-webhook", description="Puts a kitty sidecar into training pods."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter
    serve = commands.add_parser(
        "serve", help="answer admission reviews", description=_SERVE, formatter_class=raw
    )
    serve.add_argument("--tls-cert", metavar="FILE", help="certificate chain, PEM")
    serve.add_argument("--tls-key", metavar="FILE", help="its private key, PEM")
    serve.add_argument("--bind", metavar="HOST:PORT", type=_address, default="0.0.0.0:8443")
    serve.add_argument("--metrics-bind", metavar="HOST:PORT", type=_address, default="0.0.0.0:8080")
    inject = commands.add_parser(
        "inject", help="mutate manifests offline", description=_INJECT, formatter_class=raw
    )
    inject.add_argument(
        "-f", "--file", metavar="FILE", action="append", required=True, help="manifest, - for stdin"
    )
    inject.add_argument(
        "--level",
        choices=[level.value for level in Level],
        help="Pod Security level of the target namespace (default: the config's default-level)",
    )
    for command in (serve, inject):
        command.add_argument("--config", metavar="FILE", help="configuration, YAML")
    return parser


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT with a port of 0-65535")
    return text


def _serve(arguments: argparse.Namespace, config: Config) -> int:
    for flag, path in (("--tls-cert", arguments.tls_cert), ("--tls-key", arguments.tls_key)):
        try:
            with open(path or "", "rb"):
                pass
        except OSError as error:
            why = error.strerror if path else "allowed: a PEM file"
            print(f"kitty-webhook serve: {flag} {path or 'is required'}: {why}", file=sys.stderr)
            return USAGE
    from webhook.serve import Serving, serve  # noqa: PLC0415 -- inject does without gunicorn

    host, _, port = arguments.metrics_bind.rpartition(":")
    return serve(
        Serving(
            config=config,
            bind=arguments.bind,
            metrics_bind=(host.strip("[]"), int(port)),
            certificate=arguments.tls_cert,
            key=arguments.tls_key,
        )
    )

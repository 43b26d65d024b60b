"""The command line of the webhook: serve, inject, check."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from typing import TYPE_CHECKING

from webhook import __version__
from webhook.config import Config, ConfigError, keys_in_words, load_config
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
unchanged. The result goes to stdout as YAML, what was skipped to stderr.
Exit status 1, and nothing on stdout, where a file is missing or no YAML; 2 for wrong
options or a wrong configuration. What is left alone is no failure."""

_CHECK = """\
Asks the cluster of the current kubeconfig what would stop injection: the webhook's
configuration and certificate, its endpoint, versions, Pod Security levels, labels,
pods without a sidecar, and a dry run of a pod in every labelled namespace.
Exit status 1 where there is a problem."""

_SELF_SIGNED = {
    "namespace": "of the Service and the Secret",
    "service": "the Service that the API server calls",
    "secret": "the Secret that all replicas share",
    "webhook-config": "the MutatingWebhookConfiguration whose caBundle is kept",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 when done, 1 when it failed, 2 when it was asked the wrong way.
    """
    arguments = _parser().parse_args(argv)
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except OSError as error:
        if arguments.command == "serve":
            raise
        if not isinstance(error, BrokenPipeError):  # whoever read the output has left
            print(f"kitty-webhook {arguments.command}: {error}", file=sys.stderr)
        # The interpreter must not stumble over it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return status


def _run(arguments: argparse.Namespace) -> int:
    try:
        config = load_config(arguments.config)
    except ConfigError as error:
        print(f"kitty-webhook: config: {error}", file=sys.stderr)
        return USAGE
    if arguments.command == "serve":
        return _serve(arguments, config)
    if arguments.command == "check":
        return _check(arguments, config)
    from webhook.inject import Target, inject_files  # noqa: PLC0415 -- serve does without it

    level = Level(arguments.level or config.default_level)
    return inject_files(arguments.file, Target(config, level, arguments.kubernetes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kitty-webhook", description="Puts a kitty sidecar into training pods."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, summary: str, description: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog=f"keys of the configuration file, each optional:\n{keys_in_words()}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--config", metavar="FILE", help="configuration, YAML")
        return command

    _serve_flags(add("serve", "answer admission reviews", _SERVE))
    _inject_flags(add("inject", "mutate manifests offline", _INJECT))
    _check_flags(add("check", "say what would stop injection", _CHECK))
    return parser


def _serve_flags(serve: argparse.ArgumentParser) -> None:
    def address(flag: str, default: str, summary: str) -> None:
        serve.add_argument(
            flag,
            metavar="HOST:PORT",
            type=_address,
            default=default,
            help=f"{summary} (default: {default})",
        )

    address("--bind", "0.0.0.0:8443", "reviews")
    address("--metrics-bind", "0.0.0.0:8080", "health and metrics")
    files = serve.add_argument_group("a certificate in files, read again when they change")
    files.add_argument("--tls-cert", metavar="FILE", help="certificate chain, PEM")
    files.add_argument("--tls-key", metavar="FILE", help="its private key, PEM")
    own = serve.add_argument_group("or a certificate of its own, kept in a Secret")
    own.add_argument("--self-signed", action="store_true", help="make and renew it")
    for name, summary in _SELF_SIGNED.items():
        own.add_argument(f"--{name}", metavar="NAME", help=summary)
    serve.add_argument(
        "--kubeconfig", metavar="FILE", help="how to reach the API (default: the pod's own account)"
    )


def _inject_flags(inject: argparse.ArgumentParser) -> None:
    inject.add_argument(
        "-f", "--file", metavar="FILE", action="append", required=True, help="manifest, - for stdin"
    )
    inject.add_argument(
        "--level",
        choices=[level.value for level in Level],
        help="Pod Security level of the target namespace (default: the config's default-level)",
    )

    inject.add_argument(
        "--kubernetes",
        metavar="VERSION",
        type=_version,
        help="oldest version among server and kubelets; 1.29 and newer get native sidecars",
    )


def _version(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"v?(\d{1,4})\.(\d{1,4})(?:[.+-][\w.+-]*)?", text, re.ASCII)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a version such as 1.29 or v1.31.2")
    return int(match[1]), int(match[2])


def _check_flags(check: argparse.ArgumentParser) -> None:
    check.add_argument("--kubeconfig", metavar="FILE", help="default: as for kubectl")
    check.add_argument("--context", metavar="NAME", help="default: the current one")
    check.add_argument(
        "--webhook-config",
        metavar="NAME",
        default="kitty-webhook",
        help="the MutatingWebhookConfiguration (default: %(default)s)",
    )
    check.add_argument(
        "--secret",
        metavar="NAME",
        help="the served certificate's Secret, where this machine cannot reach the Service",
    )
    check.add_argument("--json", action="store_true", help="for machines")


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    whole = host and host.startswith("[") == host.endswith("]")
    if not whole or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT with a port of 0-65535")
    return text


def _serve(arguments: argparse.Namespace, config: Config) -> int:
    wrong = _wrong_certificate_flags(arguments)
    if wrong:
        print(f"kitty-webhook serve: {wrong}", file=sys.stderr)
        return USAGE
    from webhook.serve import Serving, serve  # noqa: PLC0415 -- inject does without gunicorn
    from webhook.upkeep import SelfSigned, Task  # noqa: PLC0415 -- same

    own = None
    if arguments.self_signed:
        own = SelfSigned(
            namespace=arguments.namespace,
            service=arguments.service,
            secret=arguments.secret,
            webhook_config=arguments.webhook_config,
        )
    has_cluster = bool(own or arguments.kubeconfig or os.environ.get("KUBERNETES_SERVICE_HOST"))
    host, _, port = arguments.metrics_bind.rpartition(":")
    return serve(
        Serving(
            config=config,
            bind=arguments.bind,
            metrics_bind=(host.strip("[]"), int(port)),
            task=Task(
                kubeconfig=arguments.kubeconfig,
                self_signed=own,
                certificate=arguments.tls_cert,
                versions=has_cluster and config.native_sidecar == "auto",
            ),
            key=arguments.tls_key,
        )
    )


def _wrong_certificate_flags(arguments: argparse.Namespace) -> str:
    if arguments.self_signed:
        if arguments.tls_cert or arguments.tls_key:
            return "--self-signed: not together with --tls-cert and --tls-key"
        for name, meaning in _SELF_SIGNED.items():
            if not getattr(arguments, name.replace("-", "_")):
                return f"--{name} is required with --self-signed: {meaning}"
        return ""
    for flag, path in (("--tls-cert", arguments.tls_cert), ("--tls-key", arguments.tls_key)):
        if not path:
            return f"{flag} is required: a PEM file (or --self-signed)"
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            return f"{flag} {path}: {error.strerror}; allowed: a PEM file"
    return ""


def _check(arguments: argparse.Namespace, config: Config) -> int:
    from webhook.check import Place, check, reach  # noqa: PLC0415 -- serve does without it
    from webhook.cluster import Cluster, ClusterError  # noqa: PLC0415 -- same

    try:
        cluster = Cluster.connect(kubeconfig=arguments.kubeconfig, context=arguments.context)
        with contextlib.closing(cluster):
            place = Place(
                cluster=cluster,
                config=config,
                webhook_config=arguments.webhook_config,
                secret=arguments.secret,
                reach=reach,
            )
            return check(place, as_json=arguments.json)
    except ClusterError as error:
        if arguments.json:
            print(json.dumps({"error": str(error)}))
        print(f"kitty-webhook check: {error}", file=sys.stderr)
        return FAILED

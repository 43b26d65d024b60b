"""The same mutation offline, on everything that holds a pod template."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from webhook.decision import Decision, Origin, Skip, Version, decide, left_alone, skip
from webhook.mutate import operations
from webhook.patch import apply
from webhook.pod import Pod, UnreadablePodError
from webhook.templates import pods_in, title

if TYPE_CHECKING:
    from webhook.config import Config
    from webhook.profiles import Level


class _Loader(yaml.SafeLoader):
    """YAML as Kubernetes reads it: a date is a text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


_AMBIGUOUS = re.compile(r"[-+.]?[0-9.][0-9a-zA-Z_.:+-]*|[yYnN]|=|<<")


class _Dumper(yaml.SafeDumper):
    """YAML as Kubernetes reads it: what looks like a number or a truth there is quoted.

    PyYAML leaves ``1e3``, ``0o14`` and ``y`` plain, which kubectl then takes for no text.
    """

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = "'" if _AMBIGUOUS.fullmatch(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


@dataclass(frozen=True)
class Target:
    """What is known of the cluster that the result is for.

    Attributes:
        config: The webhook's configuration.
        level: The Pod Security level of the namespace.
        oldest: The oldest version among server and kubelets; None for unknown, and then
            ``native-sidecar: auto`` stands for an ordinary sidecar.
    """

    config: Config
    level: Level
    oldest: Version | None


def inject(pod: dict[str, Any], target: Target, *, origin: Origin) -> Decision:
    """Mutates a pod or a pod template in place, as the webhook would."""
    try:
        read = Pod.read(pod)
        decision = decide(read, target.level, target.config, origin=origin, oldest=target.oldest)
        apply(pod, operations(read, decision, target.config))
    except UnreadablePodError as error:
        return skip(Skip.UNREADABLE, str(error))
    return decision


def inject_files(paths: list[str], target: Target) -> int:
    """Reads manifests, mutates them and prints them.

    Returns:
        0, or 1 where a file could not be read.
    """
    documents = []
    for path in paths:
        try:
            read = [_plain(d) for d in yaml.load_all(_read(path), Loader=_Loader)]
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            print(f"kitty-webhook inject: {path}: {why}", file=sys.stderr)
            return 1
        documents += [(f"{path}, document {i}", document) for i, document in enumerate(read, 1)]
    for place, document in documents:
        _inject_document(place, document, target)
    plain = [document for _, document in documents]
    yaml.dump_all(plain, sys.stdout, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return 0


def _plain(document: Any) -> Any:
    """The document as JSON would hold it: an anchor's aliases become copies of their own.

    Raises:
        ValueError: It holds what JSON does not, such as YAML's sets and binaries.
    """
    return json.loads(json.dumps(document, default=_refuse))


def _refuse(value: Any) -> Any:
    raise ValueError(f"a value of type {type(value).__name__} has no place in a manifest")


def _read(path: str) -> str:
    if path == "-":
        return sys.stdin.read()
    with open(path, encoding="utf-8") as file:
        return file.read()


def _inject_document(place: str, document: Any, target: Target) -> None:
    if document is None:
        return
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        print(f"{place}: no manifest, it has no kind; left as it is", file=sys.stderr)
        return
    found = list(pods_in(document))
    for one in found:
        origin = Origin(
            uid=f"{one.namespace}/{one.title}",
            namespace=one.namespace,
            name="" if one.path else one.name,
            template=one.job,
        )
        decision = inject(one.pod, target, origin=origin)
        said = decision.warnings
        if isinstance(decision.outcome, Skip) and decision.outcome.quiet:
            said = (left_alone(decision.outcome),)
        for text in said:
            print(f"{one.title}: {text}", file=sys.stderr)
    if not found:
        print(f"{title(document)}: holds no pod template, left as it is", file=sys.stderr)

"""The same mutation offline, on everything that holds a pod template."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from webhook.decision import Decision, Origin, Skip, Version, decide, skip
from webhook.mutate import operations
from webhook.patch import apply
from webhook.pod import Pod, UnreadablePodError

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def pods_in(document: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Finds the pods and pod templates of a document.

    A template is what stands under a key named ``template`` or ``...Template`` and has containers:
    so it is in Deployment, StatefulSet, Job, CronJob, JobSet, PyTorchJob, MPIJob, the runtimes of
    TrainJob, RayCluster, LeaderWorkerSet, Volcano's Job and most others.

    Yields:
        The path for messages, and the object that has ``metadata`` and ``spec``.
    """
    if isinstance(document, dict) and document.get("kind") == "Pod":
        yield "", document
        return
    stack: list[tuple[str, Any]] = [("", document)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, list):
            children = [(f"{path}[{i}]", item) for i, item in enumerate(node)]
        elif isinstance(node, dict):
            children = [(f"{path}.{key}", value) for key, value in node.items()]
        else:
            continue
        for child_path, child in children:
            key = child_path.rpartition(".")[2].lower()
            if isinstance(child, dict) and (_is_template(key, child) or child.get("kind") == "Pod"):
                yield child_path, child
        stack += [c for c in reversed(children) if isinstance(c[1], dict | list)]


def _is_template(key: str, node: dict[str, Any]) -> bool:
    spec = node.get("spec")
    return key.endswith("template") and isinstance(spec, dict) and bool(spec.get("containers"))


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
            documents += [_plain(d) for d in yaml.load_all(_read(path), Loader=_Loader)]
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            print(f"kitty-webhook inject: {path}: {error}", file=sys.stderr)
            return 1
    for document in documents:
        _inject_document(document, target)
    yaml.dump_all(documents, sys.stdout, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
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


def _inject_document(document: Any, target: Target) -> None:
    if not isinstance(document, dict):
        return
    metadata = document.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    name, namespace = str(metadata.get("name") or ""), str(metadata.get("namespace") or "")
    title = f"{document.get('kind')}/{name}"
    found = False
    for path, pod in list(pods_in(document)):
        found = True
        origin = Origin(
            uid=f"{namespace}/{title}{path}",
            namespace=namespace,
            name=name if not path else "",
            fallback_job=name if path else "",
        )
        decision = inject(pod, target, origin=origin)
        for text in decision.warnings:
            print(f"{title}{path}: {text}", file=sys.stderr)
        if isinstance(decision.outcome, Skip) and decision.outcome.quiet:
            print(f"{title}{path}: {decision.outcome}: {decision.outcome.says}", file=sys.stderr)
    if not found:
        print(f"{title}: holds no pod template, left as it is", file=sys.stderr)

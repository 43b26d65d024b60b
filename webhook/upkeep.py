"""What the server needs done beside serving: certificates kept, versions learned.

All of it runs in a child process that lives for a second: the Kubernetes client and cryptography
take 46 MB that the server then does not hold, and nothing they do can disturb a review. The child
is this module as a program: it reads what to do from its standard input and writes what came of
it to its standard output, both JSON.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import json
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from webhook.glance import EVERY

if TYPE_CHECKING:
    from collections.abc import Callable

    from webhook.cluster import Cluster
    from webhook.metrics import Metrics
    from webhook.pod import JsonObject

log = logging.getLogger("kitty.webhook")

INTERVAL = 60.0
VERSIONS_EVERY = 600.0
_FIRST_RETRY = 2.0
_CHILD_LIMIT = 45.0
_ATTEMPTS = 5


@dataclass(frozen=True, kw_only=True)
class SelfSigned:
    """Where the webhook keeps its certificates and who must trust them.

    Attributes:
        namespace: Of the Service and the Secret.
        service: The Service that the API server calls.
        secret: The Secret that all replicas share.
        webhook_config: The MutatingWebhookConfiguration whose caBundle is kept.
    """

    namespace: str
    service: str
    secret: str
    webhook_config: str


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one run of the child is asked.

    Attributes:
        kubeconfig: Path, or None for the default.
        self_signed: Keep the Secret and the caBundle; None where files are served.
        certificate: A served file whose expiry is wanted; None for the Secret's.
        versions: Whether server and kubelets are asked for their versions.
    """

    kubeconfig: str | None = None
    self_signed: SelfSigned | None = None
    certificate: str | None = None
    versions: bool = False


@dataclass(kw_only=True)
class Report:
    """What came of it; each part is there or its error is.

    Attributes:
        pem: The certificate and its key, to be served.
        expires: When the served certificate expires, seconds since 1970.
        patched: Whether the caBundle had to be put back.
        oldest: The oldest version among server and kubelets.
        errors: What failed, one line each.
    """

    pem: str | None = None
    expires: float | None = None
    patched: bool = False
    oldest: tuple[int, int] | None = None
    errors: list[str] = field(default_factory=list)


class _Lost(Exception):  # noqa: N818 -- an outcome of a race, not an error
    """Another replica was faster: read again."""


def run_task(task: Task, *, connect: Callable[[], Cluster], now: dt.datetime) -> Report:
    """Does what a task asks, each part guarded on its own.

    Args:
        task: What to do.
        connect: Gives the cluster; called only where the task needs it.
        now: The time.
    """
    from webhook.cluster import ClusterError, oldest, versions  # noqa: PLC0415 -- child only

    report = Report()
    if task.certificate:
        _expiry_of_file(task.certificate, report)
    if not (task.self_signed or task.versions):
        return report
    try:
        cluster = connect()
    except ClusterError as error:
        report.errors.append(str(error))
        return report
    if task.self_signed:
        _keep(task.self_signed, cluster, now, report)
    if task.versions:
        try:
            report.oldest = oldest(versions(cluster))
        except ClusterError as error:
            report.errors.append(f"versions: {error}")
    return report


def _expiry_of_file(path: str, report: Report) -> None:
    from webhook.certificates import expiry  # noqa: PLC0415 -- child only

    try:
        with open(path, "rb") as file:
            report.expires = expiry(file.read()).timestamp()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        report.errors.append(f"{path}: {why}")


def _keep(wanted: SelfSigned, cluster: Cluster, now: dt.datetime, report: Report) -> None:
    """The bundle is put in place before the certificate is handed out, so that it is trusted."""
    from webhook.certificates import expiry  # noqa: PLC0415 -- child only
    from webhook.cluster import ClusterError  # noqa: PLC0415 -- child only

    try:
        material = _keep_secret(wanted, cluster, now)
    except ClusterError as error:
        report.errors.append(f"secret {wanted.namespace}/{wanted.secret}: {error}")
        return
    try:
        report.patched = keep_ca_bundle(cluster, wanted.webhook_config, material.bundle)
    except ClusterError as error:
        report.errors.append(f"webhook configuration {wanted.webhook_config}: {error}")
    report.pem = (material.certificate + material.key).decode()
    report.expires = expiry(material.certificate).timestamp()


def _keep_secret(wanted: SelfSigned, cluster: Cluster, now: dt.datetime) -> Any:
    for attempt in range(_ATTEMPTS):
        try:
            return _keep_secret_once(wanted, cluster, now)
        except _Lost:
            time.sleep(0.05 * 2**attempt)
    from webhook.cluster import ClusterError  # noqa: PLC0415 -- child only

    raise ClusterError(409, "other replicas kept changing it")


def _keep_secret_once(wanted: SelfSigned, cluster: Cluster, now: dt.datetime) -> Any:
    """Reads, renews and writes back; a conflict with another replica raises _Lost."""
    from webhook import certificates  # noqa: PLC0415 -- child only
    from webhook.cluster import ClusterError  # noqa: PLC0415 -- child only

    collection = f"/api/v1/namespaces/{wanted.namespace}/secrets"
    path = f"{collection}/{wanted.secret}"
    secret: JsonObject | None = None
    try:
        secret = cluster.get(path)
    except ClusterError as error:
        if error.status != 404:
            raise
    names = certificates.service_names(wanted.service, wanted.namespace)
    try:
        stored = certificates.from_secret((secret or {}).get("data"))
        material = certificates.renewed(stored, names, now)
    except certificates.UnusableError as error:
        log.warning("secret %s is made anew: %s", wanted.secret, error)
        stored, material = None, certificates.renewed(None, names, now)
    if material is stored:
        return material
    data = certificates.to_secret(material)
    try:
        if secret is None:
            cluster.create(collection, _new_secret(wanted, data))
        else:
            cluster.replace(path, {**secret, "data": {**(secret.get("data") or {}), **data}})
    except ClusterError as error:
        if error.status == 409:
            raise _Lost from error
        raise
    return material


def _new_secret(wanted: SelfSigned, data: dict[str, str]) -> JsonObject:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": wanted.secret, "namespace": wanted.namespace},
        "type": "Opaque",
        "data": data,
    }


def keep_ca_bundle(cluster: Cluster, name: str, bundle: bytes) -> bool:
    """Puts the bundle into every entry of the webhook configuration that has another one.

    Returns:
        Whether one had: installed anew, blanked by GitOps, or the CA is new.

    Raises:
        ClusterError: The API refused, or the configuration changed meanwhile (try again later).
    """
    from webhook.cluster import WEBHOOKS  # noqa: PLC0415 -- child only

    path, wanted = f"{WEBHOOKS}/{name}", base64.b64encode(bundle).decode()
    found = cluster.get(path)
    operations: list[JsonObject] = []
    for i, entry in enumerate(found.get("webhooks") or []):
        if (entry.get("clientConfig") or {}).get("caBundle") != wanted:
            at = f"/webhooks/{i}"
            operations.append({"op": "test", "path": f"{at}/name", "value": entry.get("name")})
            add = {"op": "add", "path": f"{at}/clientConfig/caBundle", "value": wanted}
            operations.append(add)
    if operations:
        cluster.patch(path, operations)
    return bool(operations)


def in_child(task: Task) -> Report:
    """Runs a task in a child process.

    Raises:
        RuntimeError: The child failed or did not end.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "webhook.upkeep"],
            input=json.dumps(asdict(task)),
            capture_output=True,
            text=True,
            timeout=_CHILD_LIMIT,
            check=True,
        )
        raw = json.loads(done.stdout)
        raw["oldest"] = tuple(raw["oldest"]) if raw["oldest"] else None
        return Report(**raw)
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RuntimeError(f"upkeep failed: {last[0]}") from error
    except (subprocess.TimeoutExpired, OSError, ValueError, TypeError, KeyError) as error:
        raise RuntimeError(f"upkeep failed: {error}") from error


class Upkeep:
    """The loop in the server that runs tasks and takes over what comes of them.

    Args:
        task: What every run is asked; ``versions`` says whether they are asked for at all.
        pem: Where the certificate and its key are written, or None where files are served.
        metrics: Where outcomes show.
        run: Runs a task; tests give their own.
        clock: Seconds, monotonic.
        sleep: Waits for seconds.
        glance: Tells the caBundles in force, or None where they cannot be seen; None for no look
            between two runs.

    Attributes:
        oldest: The oldest version among server and kubelets, as last learned.
        looked: Whether a first run has ended, well or not.
    """

    def __init__(
        self,
        *,
        task: Task,
        pem: str | None,
        metrics: Metrics,
        run: Callable[[Task], Report] = in_child,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        glance: Callable[[], tuple[str, ...] | None] | None = None,
    ) -> None:
        self._sleep = sleep
        self._glance = glance
        self._task = task
        self._pem = pem
        self._metrics = metrics
        self._run = run
        self._clock = clock
        self._versions_due = 0.0 if task.versions else float("inf")
        self._retry = _FIRST_RETRY
        self._seen: tuple[int, int] | None = None
        self.oldest: tuple[int, int] | None = None
        self.looked = False

    def start(self) -> None:
        """Runs the loop in a thread that ends with the process."""
        threading.Thread(target=self._loop, name="upkeep", daemon=True).start()

    def _loop(self) -> None:
        while True:
            try:
                wait = self.once()
            except Exception:
                # The thread is all that renews the certificate: it outlives what it meets.
                log.exception("upkeep failed")
                wait = INTERVAL
            self.rest(wait)

    def rest(self, seconds: float) -> None:
        """Waits, but only until a caBundle is no longer what it was: it is put back in seconds."""
        until = self._clock() + seconds
        # After a failure the retries pace the runs: what cannot be put back is not tried at once.
        glance = self._glance if seconds >= INTERVAL else None
        known = glance() if glance else None
        while (left := until - self._clock()) > 0:
            self._sleep(min(left, EVERY) if glance else left)
            seen = glance() if glance else None
            known = known or seen
            if seen is not None and (seen != known or not all(seen)):
                return

    def _stamp(self) -> tuple[int, int] | None:
        try:
            stat = os.stat(self._task.certificate or "")
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino

    def once(self) -> float:
        """Runs one task and takes over its outcome.

        Returns:
            Seconds until the next run.
        """
        with_versions = self._clock() >= self._versions_due
        stamp = self._stamp()
        if not (self._task.self_signed or with_versions or stamp != self._seen):
            return INTERVAL
        task = replace(self._task, versions=with_versions)
        try:
            report = self._run(task)
        except RuntimeError as error:
            report = Report(errors=[str(error)])
        if report.pem and self._pem:
            try:
                write_atomically(self._pem, report.pem.encode())
            except OSError as error:
                report.errors.append(f"the certificate cannot be written: {error}")
        for line in report.errors:
            log.warning("upkeep: %s", line)
        if report.patched:
            log.info("the webhook configuration's caBundle was put in place")
        if report.oldest:
            self.oldest = report.oldest
        if not report.errors:
            self._seen = stamp
        if with_versions and not report.errors:
            self._versions_due = self._clock() + VERSIONS_EVERY
        self.looked = True
        self._metrics.upkeep(report, self.oldest)
        self._retry = min(self._retry * 2, INTERVAL) if report.errors else _FIRST_RETRY
        return self._retry if report.errors else INTERVAL


def write_atomically(path: str, data: bytes) -> None:
    """Replaces a file at once, readable by its owner only; not at all where it holds the same."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if file.read() == data:
            return
    temporary = f"{path}.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    os.replace(temporary, path)


def main() -> int:
    """The child: one task in, one report out."""
    from webhook.cluster import Cluster  # noqa: PLC0415 -- child only

    raw = json.load(sys.stdin)
    if raw["self_signed"]:
        raw["self_signed"] = SelfSigned(**raw["self_signed"])
    task = Task(**raw)
    report = run_task(
        task,
        connect=lambda: Cluster.connect(kubeconfig=task.kubeconfig),
        now=dt.datetime.now(dt.UTC),
    )
    print(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

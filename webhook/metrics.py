"""The webhook's own metrics, on a registry of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from webhook import __version__
from webhook.decision import Decision, Plan, Restore, Skip

if TYPE_CHECKING:
    from webhook.upkeep import Report

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


class Metrics:
    """Counters of reviews and their outcomes, and the state of what the webhook depends on."""

    def __init__(self, *, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "kitty_webhook_requests",
            "HTTP requests to the address of reviews, whatever the path, by status code.",
            ["code"],
            registry=registry,
        )
        self._injected = Counter(
            "kitty_webhook_injected",
            "Pods that were given a sidecar.",
            ["profile", "lifecycle"],
            registry=registry,
        )
        self._skipped = Counter(
            "kitty_webhook_skipped", "Pods left alone, by reason.", ["reason"], registry=registry
        )
        self._restored = Counter(
            "kitty_webhook_restored",
            "Native sidecars that another webhook had stripped of their restartPolicy.",
            registry=registry,
        )
        self.errors = Counter(
            "kitty_webhook_errors",
            "Failures of the webhook itself; the pods were let through unchanged.",
            registry=registry,
        )
        self.duration = Histogram(
            "kitty_webhook_review_duration_seconds",
            "Time from the request's body to its answer.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self._upkeep_errors = Counter(
            "kitty_webhook_upkeep_errors",
            "Failures to keep certificate or caBundle, or to learn the cluster's versions.",
            registry=registry,
        )
        self._patched = Counter(
            "kitty_webhook_ca_bundle_restored",
            "How often the webhook configuration's caBundle had to be put in place.",
            registry=registry,
        )
        # Joins the registry when it is known: an unknown value is absent.
        self._expiry = Gauge(
            "kitty_webhook_certificate_expiry_timestamp_seconds",
            "When the served certificate expires.",
            registry=None,
        )
        self._oldest = Gauge(
            "kitty_webhook_oldest_kubernetes_info",
            "The oldest version among API server and kubelets; 1 for the version in force.",
            ["version"],
            registry=registry,
        )
        self._expiry_known = False
        info = Gauge("kitty_webhook_build_info", "Always 1.", ["version"], registry=registry)
        info.labels(__version__).set(1)
        for reason in Skip:
            self._skipped.labels(reason)

    def upkeep(self, report: Report, oldest: tuple[int, int] | None) -> None:
        """Shows what a run of the upkeep found."""
        self._upkeep_errors.inc(len(report.errors))
        self._patched.inc(report.patched)
        if report.expires is not None:
            self._expiry.set(report.expires)
            if not self._expiry_known:
                self.registry.register(self._expiry)
                self._expiry_known = True
        self._oldest.clear()
        if oldest:
            self._oldest.labels(".".join(map(str, oldest))).set(1)

    def count(self, decision: Decision) -> None:
        """Counts one decision."""
        outcome = decision.outcome
        if isinstance(outcome, Plan):
            lifecycle = "native" if outcome.native else "ordinary"
            self._injected.labels(outcome.profile, lifecycle).inc()
        elif isinstance(outcome, Restore):
            self._restored.inc()
        else:
            self._skipped.labels(outcome).inc()

"""HTTP, and nothing but: the mutate paths, and beside them health and metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from http import HTTPStatus
from typing import IO, TYPE_CHECKING, Any

from flask import Flask, Response, request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from webhook.profiles import Level
from webhook.review import BadReviewError

if TYPE_CHECKING:
    from webhook.metrics import Metrics
    from webhook.reviewer import Reviewer

log = logging.getLogger("kitty.webhook")

MAX_BODY = 3 * 1024 * 1024
"""The API server's own limit of a request."""
MAX_DROPPED = 16 * 1024 * 1024


def _body(stream: IO[bytes]) -> bytes:
    """The request's body, or a 413; gunicorn ends the stream where the body ends.

    What is too much is read and dropped, up to a bound: a client that is still writing would see
    a reset instead of the answer.
    """
    try:
        body = stream.read(MAX_BODY + 1)
        if len(body) <= MAX_BODY:
            return body
        dropped = 0
        while dropped < MAX_DROPPED and (piece := stream.read(65536)):
            dropped += len(piece)
    except Exception as error:
        # Cut off, stalled or misframed: the client's doing, whatever gunicorn calls it.
        log.info("a request's body could not be read: %s", str(error) or type(error).__name__)
        raise BadReviewError("the body could not be read") from error
    raise RequestEntityTooLarge(f"the body exceeds {MAX_BODY} bytes")


class MutateApp(Flask):
    """Flask, and a way past it for a body that is there already.

    Attributes:
        direct: The review of a body sent to a path; None where Flask has to say what is wrong.
    """

    direct: Callable[[str, bytes], bytes | None]


def mutate_app(reviewer: Reviewer, metrics: Metrics) -> MutateApp:
    """The application behind TLS: ``POST /mutate`` and one path per Pod Security level.

    No answer is a 5xx: the API server would log a failure of the webhook and let the pod through
    without the word that is due to its creator.
    """
    app = MutateApp("webhook", static_folder=None)

    def mutate(level: Level | None) -> Response:
        body = reviewer.review(_body(request.environ["wsgi.input"]), level)
        return Response(body, mimetype="application/json")

    def failed(error: Exception) -> Response:
        if isinstance(error, HTTPException) and (error.code or 500) < 500:
            code, says = error.code or 400, error.description or error.name
        elif isinstance(error, BadReviewError):
            code, says = 400, str(error)
        else:
            log.error("a request failed before its review was read", exc_info=error)
            metrics.errors.inc()
            code, says = 400, "the request could not be read"
        return Response(says + "\n", status=code, mimetype="text/plain")

    def counted(response: Response) -> Response:
        metrics.requests.labels(str(response.status_code)).inc()
        return response

    ok = metrics.requests.labels(str(HTTPStatus.OK.value))

    def direct(path: str, body: bytes) -> bytes | None:
        try:
            answer = reviewer.review(body, paths[path])
        except Exception:  # noqa: BLE001 -- whatever it was, it happens to Flask again, which answers it
            return None
        ok.inc()
        return answer

    paths: dict[str, Level | None] = {"/mutate": None}
    paths |= {f"/mutate/{level}": level for level in Level}
    for path, level in paths.items():
        app.add_url_rule(path, path, partial(mutate, level), methods=["POST"])
    app.register_error_handler(Exception, failed)
    app.after_request(counted)
    app.direct = direct
    return app


Environ = dict[str, Any]
StartResponse = Callable[[str, list[tuple[str, str]]], Any]


def health_app(
    metrics: Metrics, *, ready: Callable[[], str]
) -> Callable[[Environ, StartResponse], Iterable[bytes]]:
    """The application on the second address: ``/metrics``, ``/healthz``, ``/readyz``.

    Args:
        metrics: What ``/metrics`` shows.
        ready: Gives what is missing for reviews to be answered; empty when nothing is.
    """

    def respond(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        path, status, kind, body = environ["PATH_INFO"], "200 OK", "text/plain", b"ok\n"
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            status, body = "405 Method Not Allowed", b"GET only\n"
        elif path == "/metrics":
            kind, body = CONTENT_TYPE_LATEST, generate_latest(metrics.registry)
        elif path == "/readyz":
            if missing := ready():
                status, body = "503 Service Unavailable", f"not ready: {missing}\n".encode()
        elif path != "/healthz":
            status, body = "404 Not Found", b"/metrics, /healthz, /readyz\n"
        start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    return respond

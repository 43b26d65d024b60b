"""Asks a Prometheus, or what speaks as one, over its HTTP API (v1)."""

import http.client
import ipaddress
import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from kitty.text import clean

MOST_BYTES = 256 << 20
CHUNK = 1 << 16
MOST_POINTS = 11_000
"""What Prometheus answers a range query with at most, for each series."""


class CannotTellError(Exception):
    """There is no answer; the text says why, in one line."""


@dataclass(frozen=True)
class Row:
    """One series now.

    Attributes:
        labels: Without the metric's name.
        value: A finite number.
    """

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Curve:
    """One series over time.

    Attributes:
        labels: Without the metric's name.
        points: Unix times and finite numbers; where there was none, there is no point.
    """

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the token would go along to another host."""

    def redirect_request(self, *_: object) -> None:
        """Leave it to the caller as an error."""


def selector(name: str, **labels: str) -> str:
    """Return a PromQL selector; every value is matched as it is."""
    return f"{name}{{{','.join(f'{key}={quoted(value)}' for key, value in labels.items())}}}"


def quoted(text: str) -> str:
    """Return a PromQL string literal, whose escapes are Go's."""
    return json.dumps(text, ensure_ascii=False)


class Prometheus:
    """A server's HTTP API.

    Args:
        url: Its address; a path in it is kept, as where the API is served below one.
        token: Sent as bearer token.
        timeout_s: For one answer, whole.
        monotonic: A clock.

    Attributes:
        warnings: What the server said beside its answers: that data is missing, for one.
    """

    def __init__(
        self,
        *,
        url: str,
        token: str | None = None,
        timeout_s: float = 30.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self.warnings: list[str] = []
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if _is_loopback(urllib.parse.urlsplit(url).hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def now(self) -> float:
        """Return the server's time, which need not be this machine's."""
        data = self._ask("query", query="time()")
        try:
            moment = float(data["result"][0])
        except (TypeError, KeyError, IndexError, ValueError):
            self._strange()
        if not math.isfinite(moment):
            self._strange()
        return moment

    def rows(self, expression: str, at: float) -> list[Row]:
        """Return what an expression has at a moment; what is no finite number is left out."""
        rows = []
        for labels, raw in self._series(
            self._ask("query", query=expression, time=f"{at:.3f}"), "value"
        ):
            value = self._number(raw)
            if math.isfinite(value):
                rows.append(Row(labels, value))
        return rows

    def curves(self, expression: str, *, start: float, end: float, step: int) -> list[Curve]:
        """Return what an expression had over time.

        Args:
            expression: Gives a vector.
            start: Unix time.
            end: Unix time.
            step: Seconds between two points.
        """
        assert (end - start) / step <= MOST_POINTS
        data = self._ask(
            "query_range", query=expression, start=f"{start:.3f}", end=f"{end:.3f}", step=str(step)
        )
        curves = []
        for labels, raw in self._series(data, "values"):
            if not isinstance(raw, list):
                self._strange()
            points = []
            for sample in raw:
                value = self._number(sample)
                if math.isfinite(value):
                    points.append((float(sample[0]), value))
            curves.append(Curve(labels, tuple(points)))
        return curves

    def _series(self, data: Any, key: str) -> list[tuple[dict[str, str], Any]]:
        try:
            return [
                (
                    {str(k): str(v) for k, v in row["metric"].items() if k != "__name__"},
                    row[key],
                )
                for row in data["result"]
            ]
        except (TypeError, KeyError, AttributeError):
            self._strange()

    def _number(self, sample: Any) -> float:
        try:
            return float(sample[1])
        except (TypeError, IndexError, ValueError):
            self._strange()

    def _strange(self) -> NoReturn:
        raise CannotTellError(f"{self._place()} answers in another form than a Prometheus does")

    def _place(self) -> str:
        return clean(self._url)

    def _ask(self, path: str, **arguments: str) -> Any:
        """Return ``data`` of an answer.

        Raises:
            CannotTellError: There is none.
        """
        arguments["timeout"] = f"{self._timeout_s:g}s"
        headers = {"Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(
            f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}", headers=headers
        )
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                body = self._read(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise CannotTellError(self._refusal(error)) from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                self._late(error)
            raise CannotTellError(
                f"{self._place()} does not answer: {_said(error.reason)}"
            ) from error
        except TimeoutError as error:
            self._late(error)
        except (OSError, http.client.HTTPException) as error:
            raise CannotTellError(f"{self._place()} breaks off: {_said(error)}") from error
        return self._data(body)

    def _late(self, error: Exception) -> NoReturn:
        raise CannotTellError(
            f"{self._place()} did not answer within {self._timeout_s:g} s (--timeout)"
        ) from error

    def _read(self, answer: Any) -> bytes:
        """Return the body; the whole of it must come within the limit."""
        deadline = self._monotonic() + self._timeout_s
        parts, size = [], 0
        while part := answer.read1(CHUNK):
            size += len(part)
            parts.append(part)
            if size > MOST_BYTES:
                raise CannotTellError(
                    f"{self._place()} answers with more than {MOST_BYTES >> 20} MiB"
                )
            if self._monotonic() > deadline:
                raise TimeoutError
        return b"".join(parts)

    def _refusal(self, error: urllib.error.HTTPError) -> str:
        place = f"{self._place()} answers HTTP {error.code}"
        if error.code in (401, 403):
            return (
                f"{place}: it wants another token (KITTY_TOKEN, or --token-file)"
                if self._token
                else f"{place}: it wants a token (KITTY_TOKEN, or --token-file)"
            )
        if 300 <= error.code < 400:
            target = clean(error.headers.get("Location", "elsewhere"))[:200]
            return f"{place} and points to {target}; redirects are not followed, give that address"
        try:
            told = json.loads(error.read(CHUNK))
            return f"{place}: {clean(str(told['error']))[:300]}"
        except (ValueError, TypeError, KeyError, OSError, http.client.HTTPException):
            return f"{place}: {clean(str(error.reason))[:100]}, and not as a Prometheus would"

    def _data(self, body: bytes) -> Any:
        try:
            told = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise CannotTellError(
                f"{self._place()} answers, but not with JSON: is it a Prometheus?"
            ) from error
        if not isinstance(told, dict) or told.get("status") != "success":
            self._strange()
        warnings = told.get("warnings")
        for warning in warnings if isinstance(warnings, list) else ():
            text = clean(str(warning))[:300]
            if text not in self.warnings:
                self.warnings.append(text)
        return told.get("data")


def _said(error: object) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return clean(str(text))[:200]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

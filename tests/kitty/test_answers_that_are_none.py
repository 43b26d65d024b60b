"""Whatever answers in a Prometheus's place: one line that says so, and exit status 1."""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.kitty.conftest import Kitty
from tests.kitty.servers import free_port

Answer = tuple[int, dict[str, str], bytes]
JSON = {"Content-Type": "application/json"}


class Handler(BaseHTTPRequestHandler):
    """Answers whatever `answer` returns."""

    def answer(self, query: str) -> Answer:
        """Status, headers, body."""
        raise NotImplementedError

    def send(self, body: bytes) -> None:
        """Write the body."""
        self.wfile.write(body)

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)["query"][0]
        status, headers, body = self.answer(query)
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.send(body)

    def log_message(self, *_: object) -> None:
        """Stay quiet."""


@contextmanager
def serving(handler: type[Handler]) -> Iterator[str]:
    """Serve on loopback; the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def success(data: Any, **more: Any) -> Answer:
    return 200, JSON, json.dumps({"status": "success", "data": data, **more}).encode()


STRANGE = "answers in another form than a Prometheus does"
WRONG: dict[str, tuple[Answer, str]] = {
    "a page": ((200, {"Content-Type": "text/html"}, b"<html>welcome"), "but not with JSON"),
    "another API": ((200, JSON, b'{"hello": []}'), STRANGE),
    "a list": ((200, JSON, b"[]"), STRANGE),
    "deep": ((200, JSON, b"[" * 100_000), "but not with JSON"),
    "no data": (success(None), STRANGE),
    "no time": (success({"resultType": "scalar", "result": []}), STRANGE),
    "no end of time": (success({"resultType": "scalar", "result": ["1e400"]}), STRANGE),
    "login": ((302, {"Location": "http://elsewhere/login"}, b""), "points to http://elsewhere"),
    "no token": ((401, {}, b"no"), "HTTP 401: it wants a token (KITTY_TOKEN, or --token-file)"),
    "no path": ((404, {}, b"404 page not found"), "HTTP 404: Not Found, and not as a Prometheus"),
    "gateway": ((502, {"Content-Type": "text/html"}, b"<html>"), "HTTP 502: Bad Gateway"),
    "refused": (
        (422, JSON, json.dumps({"status": "error", "error": "too\nmany \x1b[31m"}).encode()),
        r"HTTP 422: too\nmany \x1b[31m",
    ),
    "cut off": ((200, {**JSON, "Content-Length": "999"}, b'{"status"'), "JSON"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers(kitty: Kitty, name: str) -> None:
    answer, told = WRONG[name]

    class Wrong(Handler):
        def answer(self, query: str) -> Answer:
            return answer

    with serving(Wrong) as url:
        ran = kitty("jobs", url=url)
    assert (ran.status, ran.out) == (1, "")
    assert told in ran.err
    assert ran.err.startswith(f"kitty: {url} ")
    assert ran.err.count("\n") == 1


def test_nobody_there(kitty: Kitty) -> None:
    ran = kitty("jobs", url=f"http://127.0.0.1:{free_port()}")
    assert ran.status == 1
    assert "does not answer: Connection refused" in ran.err


def test_too_slow_as_a_whole(kitty: Kitty) -> None:
    class Slow(Handler):
        def answer(self, query: str) -> Answer:
            return success({"resultType": "scalar", "result": [0, "0"]})

        def send(self, body: bytes) -> None:
            # Every byte comes in time; the answer does not.
            with suppress(OSError):
                for place in range(len(body)):
                    self.wfile.write(body[place : place + 1])
                    time.sleep(0.1)

    with serving(Slow) as url:
        ran = kitty("--timeout", "1", "jobs", url=url)
    assert ran.status == 1
    assert ran.err == f"kitty: {url} did not answer within 1 s (--timeout)\n"


def test_token(kitty: Kitty, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")

    class Closed(Handler):
        def answer(self, query: str) -> Answer:
            if self.headers.get("Authorization") != "Bearer secret":
                return 401, {}, b""
            return success({"resultType": "scalar", "result": [0, "0"]})

    with serving(Closed) as url:
        wrong = kitty("jobs", url=url, KITTY_TOKEN="other")
        right = kitty("jobs", url=url, KITTY_TOKEN="secret")
        by_file = kitty("--token-file", str(file), "jobs", url=url, KITTY_TOKEN="other")
    assert "it wants another token" in wrong.err
    assert "other" not in wrong.err.replace("another", "")
    # Let in; that there are no series is another matter.
    assert STRANGE in right.err
    assert STRANGE in by_file.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--prometheus", "ftp://host", "jobs"], "is not an address like"),
        (["--prometheus", "http://", "jobs"], "is not an address like"),
        (["--prometheus", "http://user:word@host", "jobs"], "use KITTY_TOKEN"),
        (["--prometheus", "http://host:x", "jobs"], "is not an address like"),
        (["--token-file", "/nowhere", "jobs"], "No such file"),
        (["--timeout", "nan", "jobs"], "is not a number of seconds"),
        (["report", "ring", "-o", "x", "--since", "1y"], "is not a time like"),
        (["report", "ring", "-o", "x", "--since", "5s"], "is not a time like"),
        (["report", "ring"], "required: -o"),
        (["job", "ring", "--limit", "0"], "is not a number above 0"),
        (["job", "\udcff"], "the name is not UTF-8"),
        (["jobs", "--prometheus", "host:9090"], "is not an address like"),
        ([], "required: COMMAND"),
    ],
)
def test_usage(kitty: Kitty, arguments: list[str], told: str) -> None:
    ran = kitty(*arguments)
    assert (ran.status, ran.out) == (2, "")
    assert told in ran.err


def vector(*rows: tuple[dict[str, str], str]) -> dict[str, Any]:
    return {
        "resultType": "vector",
        "result": [{"metric": labels, "value": [1000.0, value]} for labels, value in rows],
    }


class Telling(Handler):
    """Answers by what the query begins with; an hour in which nothing is known, else."""

    told: ClassVar[Mapping[str, dict[str, Any]]] = {}

    def answer(self, query: str) -> Answer:
        if query == "time()":
            return success({"resultType": "scalar", "result": [1000.0, "1000"]})
        for begin, data in self.told.items():
            if query == begin or query.startswith(begin + "{"):
                return success(data, warnings=["a store is\naway"])
        return success(vector())


def test_partial_data_no_numbers_and_another_clock(kitty: Kitty) -> None:
    job = {"namespace": "ns", "job": "j"}
    rank = {**job, "pod": "p", "rank": "0"}

    class Odd(Telling):
        told: ClassVar = {
            "group by (namespace, job) (last_over_time(kitty:job:pods[15m]))": vector((job, "1")),
            "last_over_time(kitty:job:pods": vector((job, "3")),
            "kitty:rank": vector(({**rank, "node": "n"}, "1")),
            "kitty:signal": vector(
                ({**rank, "signal": "rtt"}, "NaN"),
                ({**rank, "signal": "cpu"}, "+Inf"),
                ({**rank, "signal": "run_queue"}, "0.5"),
                ({**rank, "signal": "of_tomorrow"}, "7"),
            ),
        }

    with serving(Odd) as url:
        ran = kitty("job", "j", "--json", url=url)
    assert ran.status == 0
    told = json.loads(ran.out)
    # What is no number is absent; what is not known is shown by its name; time is the server's.
    assert told["by_rank"][0]["values"] == {"run_queue": 0.5, "of_tomorrow": 7.0}
    assert told["timestamp_seconds"] == 1000.0
    assert "this machine's clock is" in told["warnings"][0]
    assert told["warnings"][1] == "a store is\\naway"
    assert ran.err.count("kitty: warning: ") == 2
    assert ran.err.count("\n") == 2


@pytest.mark.parametrize(
    ("series", "told"), [("4", "rules are not loaded"), ("", "no series of kitty's")]
)
def test_no_rules_or_no_series(kitty: Kitty, series: str, told: str) -> None:
    class Empty(Telling):
        told = {"count(kitty_pod_info)": vector(({}, series))} if series else {}

    with serving(Empty) as url:
        for arguments in (["jobs"], ["job", "x"], ["report", "x", "-o", "-"]):
            ran = kitty(*arguments, url=url)
            assert (ran.status, ran.out) == (1, "")
            assert told in ran.err


def test_series_that_lost_their_job(kitty: Kitty) -> None:
    key = {"namespace": "ns", "exported_job": "ring"}

    class Lost(Telling):
        told: ClassVar = {
            'count by (namespace, exported_job) (kitty_pod_info{exported_job!=""})': vector(
                (key, "4")
            ),
            'count(kitty_pod_info{exported_job!=""})': vector(({}, "4")),
        }

    with serving(Lost) as url:
        jobs, job = kitty("jobs", "--json", url=url), kitty("job", "ring", url=url)
    (told,) = json.loads(jobs.out)["jobs"]
    assert (told["namespace"], told["job"], told["health"]) == ("ns", "ring", "blind")
    assert told["details"] == "scraped without honor_labels (exported_job)"
    assert job.status == 1
    assert "are scraped without honor_labels" in job.err


JOB = {"namespace": "ns", "job": "j"}
FOUND = {
    "group by (namespace, job) (last_over_time(kitty:job:pods[15m]))": vector((JOB, "1")),
    "last_over_time(kitty:job:pods": vector((JOB, "4")),
}


def sentences(kitty: Kitty, more: Mapping[str, dict[str, Any]]) -> list[str]:
    class Verdicts(Telling):
        told: ClassVar = {**FOUND, **more}

    with serving(Verdicts) as url:
        ran = kitty("job", "j", "--json", url=url)
    assert ran.status == 0
    return [verdict["sentence"] for verdict in json.loads(ran.out)["verdicts"]]


def test_sentence_on_a_way(kitty: Kitty) -> None:
    ends = {**JOB, "pod": "a", "peer_pod": "b"}
    told = sentences(
        kitty,
        {
            "kitty:verdict": vector(({**ends, "class": "path"}, "0.93")),
            "kitty:verdict:since_timestamp_seconds": vector(({**ends, "class": "path"}, "940")),
            "kitty:cell": vector(
                ({**ends, "signal": "rtt"}, "0.05"), ({**ends, "signal": "retransmits"}, "0")
            ),
            "kitty:cell:median": vector(({**JOB, "signal": "rtt"}, "0.001")),
            "kitty:cell:hot": vector(({**ends, "signal": "rtt"}, "12")),
        },
    )
    assert told == [
        (
            "The way between pods a and b of job ns/j is slow or loses data; which end is at fault "
            "cannot be told: path, confidence 93%, since 00:15:40 UTC (1 min); round trips between "
            "them take 50 ms (median of the job 1 ms)."
        )
    ]


def test_sentence_on_the_whole_job(kitty: Kitty) -> None:
    told = sentences(
        kitty,
        {
            "kitty:verdict": vector(({**JOB, "class": "cpu", "rank": "all"}, "0.871")),
            "kitty:signal:median": vector(({**JOB, "signal": "run_queue"}, "0.8")),
            "kitty:signal:baseline": vector(({**JOB, "signal": "run_queue"}, "0.02")),
        },
    )
    assert told == [
        (
            "All ranks of job ns/j are slower than minutes ago, none stands out: cpu, confidence "
            "87%; the ranks' median of run_queue is 800 ms a second (ten minutes before: 20 ms a "
            "second)."
        )
    ]


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (
            "two-ranks",
            "its two ranks differ, and two are too few to tell which of them is at fault",
        ),
        (
            "ranks-missing",
            "something is slow, but ranks that were there within ten minutes are not",
        ),
        ("of-tomorrow", "of-tomorrow"),
        ("", "its two ranks differ"),
    ],
)
def test_sentence_on_nobody(kitty: Kitty, reason: str, told: str) -> None:
    labels = {**JOB, "class": "inconclusive", **({"reason": reason} if reason else {})}
    (sentence,) = sentences(kitty, {"kitty:verdict": vector((labels, "0"))})
    assert sentence.startswith(f"No rank of job ns/j is named: {told}")

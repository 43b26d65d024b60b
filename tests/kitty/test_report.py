"""Reports, opened in a real browser without a network."""

import re
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.kitty.conftest import Kitty
from tests.kitty.dataset import HOSTILE, POD
from tests.kitty.png import Image, decode
from tests.kitty.servers import RealPrometheus

MOST_BYTES = 3 << 20
COLOURS = {"c0": (0xD1, 0x24, 0x2F), "c1": (0x1F, 0x6F, 0xEB), "c2": (0x1A, 0x7F, 0x4B)}


class Page(HTMLParser):
    """What a rendered page holds: elements with their attributes, and text by section."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: dict[str, str] = {}
        self._section = ""
        self._silent = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {key: value or "" for key, value in attrs}
        self.tags.append((tag, attributes))
        if tag == "section":
            self._section = attributes.get("id", "")
        self._silent = tag in ("title", "style")

    def handle_endtag(self, tag: str) -> None:
        self._silent = False
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.text[self._section] = self.text.get(self._section, "") + data

    def each(self, tag: str, **wanted: str) -> list[dict[str, str]]:
        """Return the attributes of each element that has these."""
        return [
            attributes
            for found, attributes in self.tags
            if found == tag and wanted.items() <= attributes.items()
        ]


Look = Callable[[Path], tuple[Page, Image, str]]


@pytest.fixture
def look(browser: str, artifacts: Path, tmp_path: Path) -> Look:
    """Open a file in the browser: the page as rendered, the picture, and what it complained of."""

    def opened(file: Path) -> tuple[Page, Image, str]:
        picture = artifacts / f"{file.stem}.png"
        picture.unlink(missing_ok=True)
        done = subprocess.run(
            [
                browser,
                *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--hide-scrollbars", "--window-size=1280,1500", "--enable-logging=stderr"),
                # Nothing may be fetched: no name resolves.
                "--host-resolver-rules=MAP * ~NOTFOUND",
                f"--user-data-dir={tmp_path / 'browser'}",
                *("--dump-dom", f"--screenshot={picture}", file.as_uri()),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return Page(done.stdout), decode(picture.read_bytes()), done.stderr

    return opened


def is_drawn(picture: Image) -> None:
    """The picture is a page with text and lines in colour, not blank and not an error."""
    assert (picture.width, picture.height) == (1280, 1500)
    colours = picture.colours(every=3)
    assert len(colours) > 50
    assert colours.most_common(1)[0][1] < 0.9 * colours.total()


def complaints(log: str) -> list[str]:
    return [line for line in log.splitlines() if ":CONSOLE" in line or "Refused to" in line]


def test_four_ranks(kitty: Kitty, prometheus: RealPrometheus, look: Look, artifacts: Path) -> None:
    file = artifacts / "report-4-ranks.html"
    ran = kitty("report", "ring", "-n", "training", "-o", str(file), url=prometheus.url)
    assert (ran.status, ran.out, ran.err) == (0, "", "")
    assert file.stat().st_size < MOST_BYTES // 4
    page, picture, log = look(file)
    assert complaints(log) == []
    assert (
        "Rank 2 of job training/ring, pod ring-worker-2 on node-2, is slow: network-latency"
        in (page.text["verdict"])
    )
    # One plot a signal, in each a line a rank.
    plots = page.each("figure", **{"class": "plot"})
    assert [plot["data-signal"] for plot in plots] == [
        *("rtt", "retransmits", "run_queue", "cpu_throttled", "stopped", "storage_wait"),
        *("pipe_wait", "gpu_throttled", "tcp_busy", "tx_queue", "cpu", "futex_wait"),
        *("gpu_clock", "gpu_power"),
    ]
    for colour in ("c0", "c1", "c2", "c3"):
        assert len(page.each("path", **{"class": f"line {colour}"})) == 14
    # Both verdicts, the one of half an hour ago with the figures of then.
    assert re.search(r"rank 2\s*ring-worker-2\s*node-2\s*network-loss\s*91%", page.text["findings"])
    assert (
        "at least 3% of the segments are sent again (median of the job 0.02%)"
        in (page.text["findings"])
    )
    # Each is marked strongly in the plots of its own signals.
    assert len(page.each("rect", **{"class": "fault"})) == 2
    assert len(page.each("rect", **{"class": "faint"})) == 2 * 14 - 2
    assert "figures part of the time only: cpu_throttled, stopped" in page.text["missing"]
    assert not page.each("script")
    is_drawn(picture)
    assert picture.colours().keys() >= set(COLOURS.values())


def test_512_ranks(kitty: Kitty, prometheus: RealPrometheus, look: Look, artifacts: Path) -> None:
    file = artifacts / "report-512-ranks.html"
    ran = kitty("report", "big", "--since", "20m", "-o", str(file), url=prometheus.url)
    assert (ran.status, ran.out, ran.err) == (0, "", "")
    assert file.stat().st_size < MOST_BYTES // 4
    page, picture, log = look(file)
    assert complaints(log) == []
    assert "Rank 137 of job training/big" in page.text["verdict"]
    assert "all 512 ranks" in page.text["signals"]
    assert len(page.each("figure", **{"class": "plot"})) == 7
    # The peers are a band, the named rank is a line over it.
    assert len(page.each("path", **{"class": "band all"})) >= 7
    assert len(page.each("path", **{"class": "band half"})) >= 7
    assert len(page.each("path", **{"class": "line c0"})) == 7
    assert not page.each("path", **{"class": "line rest"})
    is_drawn(picture)
    assert COLOURS["c0"] in picture.colours()


def test_names_that_are_markup(
    kitty: Kitty, prometheus: RealPrometheus, look: Look, tmp_path: Path, artifacts: Path
) -> None:
    file = artifacts / "report-hostile.html"
    ran = kitty("report", HOSTILE, "-o", str(file), url=prometheus.url)
    assert (ran.status, ran.err) == (0, "")
    page, _, log = look(file)
    assert complaints(log) == []
    assert not page.each("script")
    assert not page.each("img")
    assert r"""evil/<script>alert(1)</script>"'&\u202e\é\n, pod "><img""" in page.text["verdict"]
    assert f"{POD}1" in page.text["findings"]
    # Nothing is asked from anywhere.
    for attribute in ("src", "href", "action", "data", "srcset", "xlink:href"):
        assert not [tag for tag, attributes in page.tags if attribute in attributes]
    assert "url(" not in file.read_text()


def test_a_job_that_ended(kitty: Kitty, prometheus: RealPrometheus) -> None:
    ran = kitty("report", "ended", "-o", "-", url=prometheus.url)
    assert ran.status == 0
    page = Page(ran.out)
    assert "has no data now" in page.text["verdict"]
    assert "None in these 1 h." in page.text["findings"]
    assert "no data in the last" in page.text["missing"]


def test_a_day_asks_for_no_more_points(kitty: Kitty, prometheus: RealPrometheus) -> None:
    ran = kitty("report", "ring", "-n", "training", "--since", "30d", "-o", "-", url=prometheus.url)
    assert (ran.status, ran.err) == (0, "")
    assert "One point every 3 h" in ran.out
    assert "A point is the worst moment since the one before." in ran.out


def test_cannot_be_written(kitty: Kitty, prometheus: RealPrometheus, tmp_path: Path) -> None:
    there = tmp_path / "report.html"
    there.write_text("mine")
    ran = kitty("report", "ended", "-o", str(tmp_path / "no" / "x.html"), url=prometheus.url)
    assert ran.status == 1
    assert ran.err.endswith("No such file or directory\n")
    assert kitty("report", "nobody", "-o", str(there), url=prometheus.url).status == 1
    assert there.read_text() == "mine"
    assert kitty("report", "ended", "-o", str(there), url=prometheus.url).status == 0
    assert there.read_text().startswith("<!doctype html>")
    assert there.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_link_and_its_files_rights_stay(
    kitty: Kitty, prometheus: RealPrometheus, tmp_path: Path
) -> None:
    there, link = tmp_path / "private.html", tmp_path / "link.html"
    there.touch(mode=0o600)
    link.symlink_to(there.name)
    assert kitty("report", "ended", "-o", str(link), url=prometheus.url).status == 0
    assert link.is_symlink()
    assert there.read_text().startswith("<!doctype html>")
    assert there.stat().st_mode & 0o777 == 0o600

"""A report as one HTML file: no script, nothing from a network, light and dark."""

from collections.abc import Iterator, Sequence

from kitty import __version__
from kitty.history import MOST_LINES, MOST_NAMED, WINDOW_S, Episode, Finding, History, Place
from kitty.plot import Bar, Line, Shade, bar_plot, line_plot, safe
from kitty.signals import EVIDENCE, Signal
from kitty.style import STYLE
from kitty.text import clean, duration, figure, moment, natural, several
from kitty.verdict import ALL, Verdict

MOST_ROWS = 200
MOST_BARS = 40
MOST_SHADES = 60
COLOURS = MOST_NAMED
BACKGROUND = "rest"


def page(history: History, *, warnings: Sequence[str]) -> str:
    """Return the whole file.

    Args:
        history: What to show.
        warnings: What the server said beside its answers.
    """
    state = history.now.state
    name = f"{state.namespace}/{state.name}"
    colours = _colours(history)
    parts = [
        "<!doctype html>\n",
        '<html lang="en"><head><meta charset="utf-8">',
        (
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        ),
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>kitty: {safe(name)}</title><style>{STYLE}</style></head><body>",
        f"<header><h1>{safe(name)}</h1>{_facts(history)}</header><main>",
        *_headline(history),
        *_findings(history),
        *_alarms(history),
        *_missing(history, warnings),
        *_plots(history, colours),
        "</main><footer>",
        (
            f"Written by kitty {safe(__version__)} at {moment(history.end)}, the time of the"
            f" Prometheus. One point every {duration(history.step)}; begins of verdicts are exact"
            f" to an evaluation, ends to a point.{_worst(history)}</footer></body></html>\n"
        ),
    ]
    return "".join(parts)


def _worst(history: History) -> str:
    if history.step <= WINDOW_S:
        return ""
    return " A point is the worst moment since the one before."


def _facts(history: History) -> str:
    state = history.now.state
    nodes = {node for node in history.nodes.values() if node}
    ranks = {rank for _, rank in history.nodes}
    facts = [
        ("from", moment(history.start)),
        ("to", f"{moment(history.end)} ({duration(history.end - history.start)})"),
        ("ranks", str(len(ranks))),
        ("pods", str(len({pod for pod, _ in history.nodes}))),
        ("nodes", str(len(nodes)) if nodes else "unknown"),
        ("now", state.health),
    ]
    if not state.present and history.last_seen is not None:
        facts.append(("last seen", moment(history.last_seen)))
    return (
        "<dl>" + "".join(f"<div><dt>{k}</dt><dd>{safe(v)}</dd></div>" for k, v in facts) + "</dl>"
    )


def _headline(history: History) -> Iterator[str]:
    state = history.now.state
    bad = "bad" if any(verdict.names_somebody for verdict in state.verdicts) else "calm"
    yield f'<section id="verdict" class="{bad}">'
    sentences = history.now.headline()
    for sentence in sentences[:MOST_BARS]:
        yield f"<p>{safe(sentence)}</p>"
    if len(sentences) > MOST_BARS:
        yield f"<p>And {len(sentences) - MOST_BARS} more verdicts.</p>"
    limits = {verdict.limit() for verdict in state.verdicts} - {""}
    for limit in sorted(limits):
        yield f'<p class="note">This cannot be told: {safe(limit)}.</p>'
    yield "</section>"


def _subject(verdict: Verdict) -> str:
    """Return who is named, as the name of a row."""
    if verdict.kind == "inconclusive":
        return "inconclusive"
    if verdict.kind == "path":
        return f"{verdict.pod} - {verdict.peer_pod}"
    return "all ranks" if verdict.rank == ALL else f"rank {verdict.rank}"


def _until(episode: Episode) -> str:
    return "lasting" if episode.lasting else moment(episode.end)[11:19]


def _when(episode: Episode) -> str:
    return (
        f"<td>{moment(episode.begin)[:19]}</td><td>{_until(episode)}</td>"
        f"<td>{duration(episode.end - episode.begin)}</td>"
    )


def _findings(history: History) -> Iterator[str]:
    yield '<section id="findings"><h2>Verdicts</h2>'
    if not history.findings:
        yield f"<p>None in these {duration(history.end - history.start)}.</p></section>"
        return
    rows: dict[str, list[Bar]] = {}
    for finding in history.findings:
        bar = Bar(
            begin=finding.begin,
            end=finding.end,
            label=f"{finding.verdict.kind}, {duration(finding.end - finding.begin)}",
            style=_class_style(finding.verdict.kind),
        )
        rows.setdefault(_subject(finding.verdict), []).append(bar)
    shown = sorted(rows.items(), key=lambda row: -sum(bar.end - bar.begin for bar in row[1]))
    shown = sorted(shown[:MOST_BARS], key=lambda row: natural(row[0].rpartition(" ")[2]))
    span = (history.start, history.end)
    yield f'<figure class="bars">{bar_plot(title="Verdicts over time", span=span, rows=shown)}'
    kinds = sorted({finding.verdict.kind for finding in history.findings})
    yield '<figcaption class="legend">'
    for kind in kinds:
        yield f'<span><i class="bar {_class_style(kind)}"></i>{safe(kind)}</span>'
    if len(rows) > MOST_BARS:
        yield f"<span>{len(rows) - MOST_BARS} more rows are left out</span>"
    yield "</figcaption></figure>"
    yield (
        '<div class="scroll"><table><thead><tr><th>begin (UTC)</th><th>end</th><th>length</th>'
        "<th>who</th><th>pod</th><th>node</th><th>class</th><th>confidence</th><th>evidence</th>"
        "</tr></thead><tbody>"
    )
    for finding in history.findings[-MOST_ROWS:]:
        yield _finding_row(finding)
    yield "</tbody></table></div>"
    if len(history.findings) > MOST_ROWS:
        yield f"<p>The latest {MOST_ROWS} of {len(history.findings)} verdicts.</p>"
    yield "</section>"


def _finding_row(finding: Finding) -> str:
    verdict = finding.verdict
    evidence = "; ".join(one.sentence("median of the job") for one in verdict.evidence)
    sure = f"{100 * verdict.confidence:.0f}%" if verdict.names_somebody else "-"
    kind = f"{verdict.kind} ({verdict.reason})" if verdict.reason else verdict.kind
    pods = f"{verdict.pod} - {verdict.peer_pod}" if verdict.peer_pod else verdict.pod
    cells = [_subject(verdict), pods, verdict.node, kind, sure, evidence]
    return "<tr>" + _when(finding) + "".join(f"<td>{safe(cell)}</td>" for cell in cells) + "</tr>"


def _class_style(kind: str) -> str:
    known = list(EVIDENCE)
    return f"k{known.index(kind)}" if kind in known else "k9"


def _alarms(history: History) -> Iterator[str]:
    if not history.alarms:
        return
    yield (
        '<section id="alerts"><h2>Other alerts and sudden changes</h2>'
        '<div class="scroll"><table><thead><tr>'
        "<th>begin (UTC)</th><th>end</th><th>length</th><th>what</th><th>of</th>"
        "</tr></thead><tbody>"
    )
    for alarm in history.alarms[-MOST_ROWS:]:
        yield f"<tr>{_when(alarm)}<td>{safe(alarm.name)}</td><td>{safe(alarm.about)}</td></tr>"
    yield "</tbody></table></div></section>"


def _missing(history: History, warnings: Sequence[str]) -> Iterator[str]:
    yield '<section id="missing"><h2>What is missing</h2>'
    told = [*history.missing, *(f"Prometheus: {clean(warning)}" for warning in warnings)]
    if told:
        yield "<ul>" + "".join(f"<li>{safe(text)}</li>" for text in told) + "</ul>"
    else:
        yield "<p>Nothing: every signal was there all the time.</p>"
    yield "</section>"


def _colours(history: History) -> dict[Place, str]:
    """Return the style of each place that is not background."""
    places = list(history.named)
    if len(history.nodes) <= COLOURS:
        rest = [place for place in history.nodes if place not in places]
        places += sorted(rest, key=lambda place: (natural(place[1]), place[0]))
    return {place: f"c{number}" for number, place in enumerate(places[:COLOURS])}


def _plots(history: History, colours: dict[Place, str]) -> Iterator[str]:
    yield '<section id="signals"><h2>Signals by rank</h2>'
    yield _legend(history, colours)
    if not history.signals:
        yield "<p>No figures in this time.</p>"
    yield '<div class="grid-of-plots">'
    for signal in history.signals:
        yield (
            f'<figure class="plot" data-signal="{safe(signal.name)}"><figcaption><b>'
            f"{safe(signal.title)}</b> <code>{safe(signal.name)}</code>{_latest(history, signal)}"
            f"</figcaption>{_plot(history, signal, colours)}</figure>"
        )
    yield "</div></section>"


def _latest(history: History, signal: Signal) -> str:
    median = history.now.medians.get(signal.name)
    if median is None:
        return ""
    return f' <span class="note">median now {safe(figure(median, signal.unit))}</span>'


def _legend(history: History, colours: dict[Place, str]) -> str:
    # In the order of their numbers, though the colours go to who stands out first.
    entries = [
        f'<span><i class="swatch {style}"></i>{safe(_place_name(place, history))}</span>'
        for place, style in sorted(
            colours.items(), key=lambda entry: (natural(entry[0][1]), entry[0][0])
        )
    ]
    others = len(history.nodes) - len(colours)
    if others > 0 and not history.bands:
        entries.append(
            f'<span><i class="swatch {BACKGROUND}"></i>{several(others, "other rank")}</span>'
        )
    if history.bands:
        entries.append(
            f'<span><i class="area all"></i>all {len(history.nodes)} ranks</span>'
            '<span><i class="area half"></i>their middle half</span>'
            '<span><i class="swatch median"></i>median</span>'
        )
    entries.append('<span><i class="area fault"></i>a verdict by this signal</span>')
    entries.append('<span><i class="area faint"></i>another verdict</span>')
    return f'<p class="legend">{"".join(entries)}</p>'


def _place_name(place: Place, history: History) -> str:
    pod, rank = place
    node = history.nodes.get(place, "")
    where = f"{pod} on {node}" if node else pod
    return f"rank {rank} ({where})" if rank else f"pod {where}"


def _plot(history: History, signal: Signal, colours: dict[Place, str]) -> str:
    lines = []
    if history.bands and history.medians.get(signal.name):
        lines.append(
            Line(label="median of the job", points=history.medians[signal.name], style="median")
        )
    by_pod = {pod: style for (pod, _), style in reversed(colours.items())}
    styled = [
        (colours.get(place) or (by_pod.get(place[0]) if not place[1] else None), place, points)
        for place, points in history.lines.get(signal.name, {}).items()
    ]
    # The background first, and whoever is named most surely last, on top.
    styled.sort(key=lambda entry: (entry[0] is not None, _reversed(entry[0])))
    for style, place, points in styled:
        ranks = [place] if place[1] else [key for key in history.nodes if key[0] == place[0]]
        label = _place_name(ranks[0] if len(ranks) == 1 else place, history)
        lines.append(Line(label=label, points=points, style=style or BACKGROUND))
    return line_plot(
        title=f"{signal.title}, by rank over time",
        unit=signal.unit,
        span=(history.start, history.end),
        step=history.step,
        lines=lines[: MOST_LINES * 2],
        band=history.bands.get(signal.name, {}),
        shades=_shades(history, signal),
    )


def _reversed(style: str | None) -> int:
    return -int(style[1:]) if style else 0


def _shades(history: History, signal: Signal) -> list[Shade]:
    """Return the verdicts' stretches of time, those by this signal over the others."""
    shades = [
        Shade(
            begin=finding.begin,
            end=finding.end,
            strong=signal.name in EVIDENCE.get(finding.verdict.kind, ()),
            label=f"{_subject(finding.verdict)}: {finding.verdict.kind}",
        )
        for finding in history.findings
    ]
    shades.sort(key=lambda shade: (shade.strong, shade.end - shade.begin))
    return shades[-MOST_SHADES:]

"""The jobs that a Prometheus knows, and how each is."""

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kitty.prometheus import CannotTellError, Prometheus, Row
from kitty.text import clean, several, shortened
from kitty.verdict import Verdict, by_job, read_verdicts

SEEN = "1m"
"""How old what is said of a job may be: what stands before a Prometheus was down looks like now."""
GONE = "15m"
"""For how long a job without data is listed."""

NO_RULES = (
    "kitty's rules are not loaded in this Prometheus: it has series of sidecars and none of"
    " kitty:job:pods (list kitty.rules.yaml under rule_files)"
)
LOST = "scraped without honor_labels (exported_job)"
NO_SERIES = "this Prometheus has no series of kitty's: does it scrape the sidecars?"

ONE_RANK = "one rank has nothing to be compared with"
NO_RANK = "no rank is known"

OK, VERDICT, INCONCLUSIVE, BLIND, NO_DATA = "ok", "verdict", "inconclusive", "blind", "no data"


class AmbiguousError(Exception):
    """Jobs of one name in several namespaces; the text names them."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """One job.

    Attributes:
        namespace: Its namespace.
        name: Its name.
        pods: How many are seen now.
        ranks: How many ranks they have.
        verdicts: What the rules say, the surest first.
        blind: What the rules cannot see, in words.
        withheld: Why they give no verdict, in words.
        seen: Unix time at which it was last seen.
        present: Whether it is seen now.
    """

    namespace: str
    name: str
    pods: int
    ranks: int
    verdicts: Sequence[Verdict]
    blind: Sequence[str]
    withheld: Sequence[str]
    seen: float
    present: bool

    @property
    def health(self) -> str:
        """One of the five words: what matters most."""
        if not self.present:
            return NO_DATA
        if any(verdict.names_somebody for verdict in self.verdicts):
            return VERDICT
        if self.verdicts:
            return INCONCLUSIVE
        return BLIND if self.blind or self.withheld else OK

    @property
    def since(self) -> float | None:
        """Since when: a verdict's begin, or when a job without data was last seen."""
        if self.health == NO_DATA:
            return self.seen
        if self.health in (VERDICT, INCONCLUSIVE):
            return self.verdicts[0].since
        return None

    def details(self) -> str:
        """Return what belongs behind the health, in a few words."""
        if self.health == VERDICT:
            named = [verdict for verdict in self.verdicts if verdict.names_somebody]
            return shortened(
                [f"{verdict.subject()}: {clean(verdict.kind)}" for verdict in named], most=2
            )
        if self.health == INCONCLUSIVE:
            return clean(self.verdicts[0].reason)
        return shortened([*self.withheld, *self.blind], most=2) if self.health == BLIND else ""


def read_jobs(server: Prometheus, at: float) -> list[JobState]:
    """Return all jobs, those that need somebody first.

    Raises:
        CannotTellError: There are none: nothing is scraped, or the rules are not loaded.
    """
    pods = _by_job(server.rows(f"last_over_time(kitty:job:pods[{SEEN}])", at))
    seen = _by_job(
        server.rows(
            f"max by (namespace, job) (max_over_time(timestamp(kitty:job:pods)[{GONE}:15s]))", at
        )
    )
    seen.update(dict.fromkeys(pods, at))
    lost = read_lost(server, at)
    if not seen and not lost:
        raise CannotTellError(_nothing(server, at))
    ranks = _by_job(
        server.rows("count by (namespace, job) (count by (namespace, job, rank) (kitty:rank))", at)
    )
    verdicts = by_job(read_verdicts(server, at))
    blind = read_blind(server, at)
    withheld = read_withheld(server, at)
    for key in pods:
        if ranks.get(key, 0) <= 1:
            withheld.setdefault(key, []).append(ONE_RANK if key in ranks else NO_RANK)
    jobs = [
        JobState(
            namespace=key[0],
            name=key[1],
            pods=int(pods.get(key, 0)),
            ranks=int(ranks.get(key, 0)),
            verdicts=verdicts.get(key, ()),
            blind=blind.get(key, ()),
            withheld=withheld.get(key, ()),
            seen=when,
            present=key in pods,
        )
        for key, when in seen.items()
    ]
    jobs += [job for job in lost if (job.namespace, job.name) not in pods]
    order = (VERDICT, INCONCLUSIVE, BLIND, OK, NO_DATA)
    return sorted(jobs, key=lambda job: (order.index(job.health), job.namespace, job.name))


def read_withheld(server: Prometheus, at: float) -> dict[tuple[str, str], list[str]]:
    """Return why the rules give no verdict on a job, by namespace and job."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in server.rows("kitty:job:starting", at):
        found.setdefault(_key(row), []).append("it began less than 20 seconds ago")
    for row in server.rows("kitty:job:withheld", at):
        found.setdefault(_key(row), []).append(clean(row.labels.get("reason", "")))
    return found


def read_blind(server: Prometheus, at: float) -> dict[tuple[str, str], list[str]]:
    """Return what the rules should see of a job and do not, by namespace and job."""
    found: dict[tuple[str, str], list[str]] = {}
    silent: Counter[tuple[str, str]] = Counter()
    firing = 'ALERTS{alertname=~"KittyBlind|KittySidecarSilent",alertstate="firing"}'
    for row in server.rows(firing, at):
        if row.labels.get("alertname") == "KittyBlind":
            collector, reason = row.labels.get("collector", ""), row.labels.get("reason", "")
            why = f"{clean(collector)} ({clean(reason)})"
            if why not in found.setdefault(_key(row), []):
                found[_key(row)].append(why)
        else:
            silent[_key(row)] += 1
    for key, count in silent.items():
        found.setdefault(key, []).append(several(count, "silent sidecar"))
    return found


def read_lost(server: Prometheus, at: float) -> list[JobState]:
    """Return jobs whose series lost their job's label, so that the rules leave them out."""
    rows = server.rows('count by (namespace, exported_job) (kitty_pod_info{exported_job!=""})', at)
    return [
        JobState(
            namespace=row.labels.get("namespace", ""),
            name=row.labels.get("exported_job", ""),
            pods=0,
            ranks=int(row.value),
            verdicts=(),
            blind=(),
            withheld=[LOST],
            seen=at,
            present=True,
        )
        for row in rows
    ]


def _nothing(server: Prometheus, at: float) -> str:
    """Return why there is no job at all."""
    if server.rows('count(kitty_pod_info{exported_job!=""})', at):
        return f"all series of kitty's in this Prometheus are {LOST}: no job is compared"
    return NO_RULES if server.rows("count(kitty_pod_info)", at) else NO_SERIES


def find_job(
    server: Prometheus, at: float, *, name: str, namespace: str | None, window: str = GONE
) -> tuple[str, str]:
    """Return namespace and name of the job that is meant.

    Args:
        server: Where to look.
        at: Unix time of the server.
        name: As the user gave it.
        namespace: The same; None where it was left out.
        window: How far back it may have been seen.

    Raises:
        CannotTellError: There is no such job; close names are told.
        AmbiguousError: It is in several namespaces.
    """
    rows = server.rows(f"group by (namespace, job) (last_over_time(kitty:job:pods[{window}]))", at)
    known = sorted((row.labels.get("namespace", ""), row.labels.get("job", "")) for row in rows)
    if not known:
        raise CannotTellError(_nothing(server, at))
    of_name = [key for key in known if key[1] == name]
    found = [key for key in of_name if namespace in (None, key[0])]
    if len(found) == 1:
        return found[0]
    if found:
        spaces = ", ".join(clean(key[0]) for key in found)
        raise AmbiguousError(
            f"job {clean(name)} is in several namespaces ({spaces}): give one by -n"
        )
    raise CannotTellError(_unknown(name, namespace, known))


def _unknown(name: str, namespace: str | None, known: Sequence[tuple[str, str]]) -> str:
    where = "" if namespace is None else f" in namespace {clean(namespace)}"
    elsewhere = [f"{space}/{job}" for space, job in known if job == name]
    near = difflib.get_close_matches(name, sorted({job for _, job in known}), n=3, cutoff=0.5)
    text = f"no job {clean(name)}{where}"
    if elsewhere:
        return f"{text}; there is {shortened([clean(entry) for entry in elsewhere])}"
    if near:
        return f"{text}; close names: {', '.join(map(clean, near))}"
    return f"{text}; the jobs are {shortened([clean(f'{space}/{job}') for space, job in known])}"


def _key(row: Row) -> tuple[str, str]:
    return row.labels.get("namespace", ""), row.labels.get("job", "")


def _by_job(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    return {_key(row): row.value for row in rows}

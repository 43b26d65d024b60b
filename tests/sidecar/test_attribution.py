"""Ranks, launchers and workers told apart, by trees as launchers make them."""

from typing import Any

from sidecar.attribution import PodView, attribute
from sidecar.config import Config
from sidecar.sources.processes import Process

CONTAINER = "/kubepods/pod1/trainer"
OWN = "/kubepods/pod1/kitty"


def process(pid: int, ppid: int = 0, **options: Any) -> Process:
    return Process(
        pid=pid, ppid=ppid, **{"start": pid, "container": CONTAINER, "watch": True, **options}
    )


def view(*processes: Process, **config: Any) -> PodView:
    return attribute(processes, Config(**config), own_container=OWN)


def ranks(pod: PodView) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    return {rank.rank: (rank.heads, rank.members) for rank in pod.ranks}


def test_an_empty_pod() -> None:
    pod = view(job="llm")
    assert (pod.job, pod.ranks, pod.watched) == ("llm", (), frozenset())


def test_one_trainer_with_workers() -> None:
    """Data-loader workers inherit the rank and count towards it."""
    pod = view(process(10, rank="3"), process(11, 10, rank="3"), process(12, 11, rank="3"))
    assert ranks(pod) == {"3": ((10,), (10, 11, 12))}


def test_torchrun_is_a_launcher() -> None:
    pod = view(
        process(10),
        process(11, 10, rank="0", launched=True),
        process(12, 10, rank="1", launched=True),
        process(13, 12, rank="1", launched=True),
    )
    assert ranks(pod) == {"0": ((11,), (11,)), "1": ((12,), (12, 13))}
    assert pod.watched - pod.rank_of.keys() == {10}


def test_torchrun_under_an_operator_that_gives_the_pod_a_rank() -> None:
    """The agent carries the pod's RANK, its one worker the same number: the worker is the rank."""
    pod = view(process(10, rank="2"), process(11, 10, rank="2", launched=True))
    assert ranks(pod) == {"2": ((11,), (11,))}


def test_srun_gives_the_launcher_a_rank_of_its_node() -> None:
    pod = view(
        process(10, rank="1"),
        process(11, 10, rank="8", launched=True),
        process(12, 10, rank="9", launched=True),
    )
    assert ranks(pod) == {"8": ((11,), (11,)), "9": ((12,), (12,))}


def test_a_shell_around_the_trainer_is_a_launcher() -> None:
    pod = view(process(10), process(11, 10, rank="0"))
    assert ranks(pod) == {"0": ((11,), (11,))}


def test_ranks_come_in_the_order_of_their_numbers() -> None:
    pod = view(process(1, rank="10"), process(2, rank="9"), process(3, rank="0"))
    assert [rank.rank for rank in pod.ranks] == ["0", "9", "10"]


def test_a_daemon_that_left_its_tree_still_counts_to_its_rank() -> None:
    pod = view(process(10, rank="0"), process(20, 1, rank="0"))
    assert ranks(pod) == {"0": ((10,), (10, 20))}


def test_without_a_rank_each_containers_topmost_process_has_series() -> None:
    pod = view(
        process(10),
        process(11, 10),
        process(20, container="/kubepods/pod1/other"),
        rank="5",
    )
    assert ranks(pod) == {"5": ((10, 20), (10, 11, 20))}


def test_of_several_trees_in_a_container_the_oldest_has_series() -> None:
    assert ranks(view(process(10), process(11, 1), process(12, 11), rank="5")) == {
        "5": ((10,), (10, 11, 12))
    }


def test_the_pods_rank_gives_way_to_one_that_a_process_carries() -> None:
    assert list(ranks(view(process(10, rank="3"), rank="0"))) == ["3"]


def test_mpi_ranks_below_sshd_are_watched_though_ssh_cleared_their_environment() -> None:
    pod = view(
        process(10),
        process(11, 10, watch=None),
        process(12, 11, watch=None, rank="4"),
        process(13, 11, watch=None, rank="5"),
    )
    assert ranks(pod) == {"4": ((12,), (12,)), "5": ((13,), (13,))}


def test_one_that_left_the_tree_is_watched_by_its_container() -> None:
    pod = view(process(10), process(30, 1, watch=None, rank="4"))
    assert ranks(pod) == {"4": ((30,), (30,))}


def test_containers_do_not_count_where_they_are_the_agents_own() -> None:
    """Outside containers all processes have one cgroup, and not all of them train."""
    pod = view(process(10, container=OWN), process(30, 1, container=OWN, watch=None))
    assert pod.watched == {10}


def test_a_clean_environment_below_a_watched_process_is_watched() -> None:
    """Also where all share the agent's control group, and only the tree tells."""
    pod = view(
        process(10, container=OWN),
        process(11, 10, container=OWN, watch=None),
        process(12, 11, container=OWN, watch=None, rank="4"),
        process(30, 1, container=OWN, watch=None, rank="5"),
    )
    assert pod.watched == {10, 11, 12}
    assert ranks(pod) == {"4": ((12,), (12,))}


def test_a_process_that_says_no_is_not_watched_nor_what_it_starts() -> None:
    pod = view(
        process(10), process(11, 10, watch=False), process(12, 11, watch=None, container=OWN)
    )
    assert pod.watched == {10}


def test_without_environments_the_containers_are_watched() -> None:
    pod = view(
        process(1, watch=None, environ_readable=False, container="/kubepods/pod1/pause"),
        process(10, watch=None, environ_readable=False),
        process(20, watch=None, container=OWN),
        rank="2",
        job="llm",
    )
    assert pod.watched == {10}
    assert ranks(pod) == {"2": ((10,), (10,))}
    assert pod.ranks[0].job == "llm"


def test_a_circle_of_reused_pids_ends() -> None:
    pod = view(process(10, 11, rank="0"), process(11, 10, rank="0"))
    assert pod.watched == {10, 11}


def test_the_annotation_is_the_job_on_an_injected_pod() -> None:
    jobs = (("JOB_NAME", "mine"), ("TORCHELASTIC_RUN_ID", "run"), ("SLURM_JOB_ID", "77"))
    assert view(process(10, jobs=jobs), pod="p", job="llm").job == "llm"
    assert view(process(10, jobs=jobs), job="llm").job == "mine"
    assert view(process(10, jobs=jobs[1:]), job="llm").job == "run"
    assert view(process(10, jobs=jobs[2:]), job="llm").job == "77"
    assert view(process(10), job="llm").job == "llm"


def test_a_launcher_may_know_the_job_that_ranks_do_not() -> None:
    pod = view(process(10, jobs=(("SLURM_JOB_ID", "77"),)), process(11, 10, rank="0"))
    assert (pod.job, pod.ranks[0].job) == ("77", "77")

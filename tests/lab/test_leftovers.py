"""What a killed lab left behind is removed, and nothing else."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lab.cgroups import Cgroup, hierarchies
from lab.leftovers import (
    PREFIX,
    VAR_TMP,
    on_disk,
    owned_name,
    owner_is_gone,
    remove_cgroup,
    start_time,
    sweep,
    temporary_directory,
)
from lab.namespaces import in_cgroup


def ended_owner() -> str:
    """The name that a process gave its things before it ended."""
    code = "from lab.leftovers import owned_name; print(owned_name())"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_an_owner_is_its_pid_and_start_time() -> None:
    name = owned_name()
    assert name.startswith(f"{PREFIX}{os.getpid()}-")
    assert not owner_is_gone(name)
    assert owner_is_gone(name + "0")  # the pid is another process's by now
    assert owner_is_gone(ended_owner())


@pytest.mark.parametrize("name", ["kitty-lab-", "kitty-lab-x-1", "kitty-lab-1", "other-1-1"])
def test_names_of_another_kind_have_no_owner(name: str) -> None:
    assert not owner_is_gone(name)


def test_a_command_may_hold_spaces_and_parentheses(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = " ".join(str(number) for number in range(4, 30))
    (tmp_path / "7" / "stat").write_text(f"7 (a) b (c) S {fields}\n")
    assert start_time(7, proc=tmp_path) == 22
    assert start_time(8, proc=tmp_path) is None


def test_only_what_has_no_owner_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    gone = ended_owner()
    for name in (gone, owned_name(), "kitty-lab-notes", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    assert sweep([]) == [gone]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([owned_name(), "kitty-lab-notes", "other"])


def test_a_directory_in_memory_is_not_on_disk() -> None:
    assert not on_disk(Path("/dev/shm"))
    assert not on_disk(Path("/nowhere"))


def test_temporary_files_go_where_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert temporary_directory() == tmp_path
    monkeypatch.setenv("TMPDIR", "/dev/shm")
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert temporary_directory() == Path("/dev/shm")
    monkeypatch.delenv("TMPDIR")
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    assert temporary_directory() == (VAR_TMP if on_disk(VAR_TMP) else Path("/dev/shm"))


@pytest.mark.alone  # any lab that starts sweeps
def test_a_cgroup_is_removed_with_the_process_inside(root: None) -> None:
    trees = hierarchies()
    if not trees:
        pytest.skip("no cgroup hierarchy is mounted and writable here")
    gone = ended_owner()
    inner = Cgroup(trees, gone).child("pod").child("container")
    with subprocess.Popen(in_cgroup(inner, ["sleep", "600"])) as process:
        entered = [Path(directory) / "cgroup.procs" for directory in inner.directories()]
        while not all(str(process.pid) in path.read_text().split() for path in entered):
            assert process.poll() is None
        assert gone in sweep(tree.mount for tree in trees)
        assert process.wait(10) == -9
    for tree in trees:
        assert not (tree.mount / gone).exists()


def test_removing_what_is_not_there_is_done(tmp_path: Path) -> None:
    assert remove_cgroup(tmp_path / "none")

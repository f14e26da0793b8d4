"""A folder of a process that was killed is removed by the next, one whose process lives is not."""

import subprocess
import sys
import tempfile

import pytest

from nereus_adapters.rollout.own_folder import OwnFolder

KIND = "nereus-test-"
HOLDER = f"""
from nereus_adapters.rollout.own_folder import OwnFolder
made = OwnFolder("{KIND}")
(made.path / "socket").touch()
print(made.path, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Everybody's folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def started():
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return holder, holder.stdout.readline().strip()


def test_what_a_killed_process_left_is_removed_by_the_next_and_nothing_else(temporary):
    (other := temporary / "nereus-other").mkdir()
    killed, left = started()
    living, held = started()
    killed.kill()
    killed.communicate()
    assert {str(p) for p in temporary.iterdir()} == {left, held, str(other)}
    own = OwnFolder(KIND)
    assert {str(p) for p in temporary.iterdir()} == {str(own.path), held, str(other)}
    living.communicate("\n")
    own.close()
    own.close()
    OwnFolder(KIND).close()
    assert list(temporary.iterdir()) == [other]


def test_processes_that_start_at_once_leave_one_another_alone(temporary):
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    folders = [holder.stdout.readline().strip() for holder in holders]
    assert len(set(folders)) == len(holders)
    for holder in holders:
        assert holder.poll() is None
    assert {str(p) for p in temporary.iterdir()} == set(folders)
    for holder in holders:
        holder.communicate("\n")

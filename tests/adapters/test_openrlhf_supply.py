"""The file in which devices are asked back: nothing in it, and nothing about it, ends a job."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

from nereus_adapters.openrlhf.supply import Supply
from nereus_core.cluster import Device

DEVICES = (Device("a", 0), Device("a", 1), Device("b", 0))


@pytest.fixture
def ray(monkeypatch):
    """As much of Ray as tells of nodes."""
    nodes = [{"NodeManagerAddress": name, "NodeID": name, "Alive": True} for name in "ab"]
    ray, private, state = (ModuleType(n) for n in ("ray", "ray._private", "ray._private.state"))
    ray.nodes = lambda: nodes
    state.state = SimpleNamespace(get_draining_nodes=dict)
    for module in (ray, private, state):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return state


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None], ids=["not text", "not a file"])
def test_a_file_that_cannot_be_read_is_told_once_and_the_last_word_counts(
    ray, tmp_path, caplog, content
):
    file = tmp_path / "leaving"
    supply = Supply(lambda: DEVICES, file)
    assert supply.leaving() == frozenset()
    file.write_text("a:1\nno device\n")
    assert supply.leaving() == {DEVICES[1]}
    if content is None:
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(content)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="nereus"):
        assert supply.leaving() == supply.leaving() == {DEVICES[1]}
    assert [record.getMessage().count("cannot be read") for record in caplog.records] == [1]


def test_devices_of_nodes_that_drain_leave_with_those_of_the_file(ray, tmp_path):
    (tmp_path / "leaving").write_text("a:0")
    supply = Supply(lambda: DEVICES, tmp_path / "leaving")
    assert supply.leaving() == {DEVICES[0]}
    ray.state.get_draining_nodes = lambda: {"b": 0}
    assert supply.leaving() == {DEVICES[0], DEVICES[2]}

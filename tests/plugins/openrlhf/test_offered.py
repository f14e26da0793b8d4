"""Which devices a job may have beside its own, by what Ray says is free; Ray is not there."""

from types import SimpleNamespace

import pytest

from nereus_adapters import ray_bundles
from nereus_adapters.openrlhf import joining
from nereus_adapters.openrlhf.facts import BackendSection
from nereus_adapters.openrlhf.running import Running
from nereus_adapters.openrlhf.seats import Bundle
from nereus_adapters.openrlhf.signals import Signals
from nereus_adapters.ray_bundles import Free
from nereus_core.cluster import Device
from nereus_core.errors import DevicesMissing, NotAtBoundary, WaitTimeout
from nereus_core.gate import Gate
from nereus_core.layout import Layout
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN

pytestmark = pytest.mark.real

A, B, C = ([Device(node, index) for index in range(4)] for node in "abc")
H200 = frozenset({"accelerator_type:H200"})


class Ray:
    """Has so many GPUs free by node, and notes what it is asked for."""

    def __init__(self, monkeypatch, **free):
        self.free, self.asked, self.removed, self.ended = free, [], [], []
        monkeypatch.setattr(ray_bundles, "free_by_node", lambda: self.free)
        monkeypatch.setattr(ray_bundles, "placed", self.placed)
        monkeypatch.setattr(
            ray_bundles, "gpus_of", lambda group, count, _: [7 - i for i in range(count)]
        )
        monkeypatch.setattr(ray_bundles, "removed", self.remove)
        self.takes = True
        monkeypatch.setattr(joining.ray, "kill", self.ended.append)

    def remove(self, group):
        self.removed.append(group)
        return self.takes

    def placed(self, node, count):
        if self.free[node].count < count:
            raise DevicesMissing(f"free GPU ({node})", count, self.free[node].count)
        self.asked.append((node, count))
        return f"group {len(self.asked)}"


def running(max_devices, own=A[:2]):
    section = BackendSection(max_devices=max_devices)
    found = Running(SimpleNamespace(), section, Gate(10.0), Signals())
    found.bundles = {device: Bundle("of the job", n, device.index) for n, device in enumerate(own)}
    return found


def offered(job, *unusable, draining=()):
    joining.look(job, unusable, draining)
    return sorted(job.offered)


def take(job, devices, stands=True):
    joining.take(job, devices, lambda: stands)


def test_free_gpus_are_offered_up_to_a_number_those_of_the_jobs_own_nodes_first(monkeypatch):
    Ray(monkeypatch, b=Free(4, H200), a=Free(1, H200))
    assert offered(running(None)) == []
    assert offered(running(2)) == []
    assert offered(running(3)) == [A[2]]
    assert offered(running(5)) == [A[2], B[0], B[1]]
    assert offered(running(50)) == [A[2], *B]


def test_others_are_offered_for_devices_that_are_to_be_left_and_none_of_those(monkeypatch):
    Ray(monkeypatch, a=Free(2, H200))
    assert offered(running(3), A[0]) == [A[2], A[3]]
    assert offered(running(3), A[2]) == [A[3]]


def test_nodes_with_other_accelerators_are_not_offered(monkeypatch):
    Ray(
        monkeypatch, a=Free(0, H200), b=Free(4, frozenset({"accelerator_type:L4"})), c=Free(1, H200)
    )
    assert offered(running(8)) == [C[0]]


def test_what_was_offered_and_taken_by_another_job_is_known_and_no_longer_offered(monkeypatch):
    ray = Ray(monkeypatch, a=Free(2, H200))
    job = running(8)
    assert offered(job) == [A[2], A[3]]
    ray.free = {"a": Free(0, H200)}
    assert offered(job) == []
    assert job.devices == set(A)


def test_devices_are_asked_for_by_node_and_given_back_when_no_unit_is_on_any(monkeypatch):
    ray = Ray(monkeypatch, a=Free(2, H200), b=Free(1, H200))
    job = running(8)
    take(job, [A[1], A[2], A[3], B[0]])
    assert ray.asked == [("a", 2), ("b", 1)]
    assert [job.bundles[d] for d in (A[2], A[3], B[0])] == [
        Bundle("group 1", 0, 7),
        Bundle("group 1", 1, 6),
        Bundle("group 2", 0, 7),
    ]
    take(job, [A[2], B[0]])  # they are the job's own now
    assert len(ray.asked) == 2
    job.ranks = {(ACTOR_TRAIN, A[2]): "rank on a", (ACTOR_TRAIN, B[0]): "rank on b"}
    job.alive = UnitMap([Unit(UnitId(ACTOR_GENERATE, 0), Layout(1), (A[3],))])
    joining.give_back(job)
    assert (ray.removed, ray.ended) == (["group 2"], ["rank on b"])
    assert sorted(job.bundles) == A
    job.alive = UnitMap()
    joining.give_back(job)
    assert (ray.removed, ray.ended) == (["group 2", "group 1"], ["rank on b", "rank on a"])
    assert sorted(job.bundles) == A[:2]
    assert not job.ranks


def test_nodes_that_drain_are_not_offered(monkeypatch):
    Ray(monkeypatch, a=Free(1, H200), b=Free(2, H200))
    assert offered(running(8), draining=("a",)) == [B[0], B[1]]


def test_what_a_node_could_not_give_is_not_offered_until_it_has_more_or_less(monkeypatch):
    """Ray tells a sum: halves of two devices count as one, which is nowhere to be had."""
    ray = Ray(monkeypatch, a=Free(2, H200), b=Free(1, H200))
    job = running(8)
    assert offered(job) == [A[2], A[3], B[0]]
    placed = ray_bundles.placed
    monkeypatch.setattr(ray_bundles, "placed", lambda node, count: placed(node, 9))
    with pytest.raises(DevicesMissing):
        take(job, [A[2]])
    assert sorted(job.offered) == [B[0]]
    assert offered(job) == [B[0]]
    ray.free["a"] = Free(1, H200)
    assert offered(job) == [A[2], B[0]]


def test_a_device_that_is_asked_back_is_kept_for_ray_would_give_it_out_again(monkeypatch):
    ray = Ray(monkeypatch, a=Free(2, H200))
    job = running(8)
    take(job, [A[2]])
    job.leaving = job.asked_back = frozenset([A[2]])
    joining.give_back(job)
    assert not ray.removed
    assert A[2] in job.bundles
    assert A[2] not in offered(job, A[2])
    job.leaving = job.asked_back = frozenset()
    joining.give_back(job)
    assert ray.removed == ["group 1"]


def test_what_comes_after_its_boundary_is_given_back_at_once(monkeypatch):
    ray = Ray(monkeypatch, a=Free(2, H200))
    job = running(8)
    with pytest.raises(NotAtBoundary, match="Ray gave a:2 so late"):
        take(job, [A[2]], stands=False)
    assert ray.removed == ["group 1"]
    assert sorted(job.bundles) == A[:2]


def test_a_process_that_does_not_start_there_leaves_nothing_behind(monkeypatch):
    ray = Ray(monkeypatch, a=Free(2, H200))

    def late(group, count, timeout_s):
        raise WaitTimeout("a bundle to say which device it is", timeout_s)

    monkeypatch.setattr(ray_bundles, "gpus_of", late)
    job = running(8)
    with pytest.raises(WaitTimeout, match="waited 120 s"):
        take(job, [A[2]])
    assert ray.removed == ["group 1"]
    assert sorted(job.bundles) == A[:2]


def test_a_group_that_ray_does_not_take_is_offered_to_it_again(monkeypatch):
    ray = Ray(monkeypatch, a=Free(2, H200))
    job = running(8)
    take(job, [A[2]])
    ray.takes = False
    joining.give_back(job)
    assert A[2] in job.bundles
    ray.takes = True
    joining.give_back(job)
    assert ray.removed == ["group 1"] * 2
    assert A[2] not in job.bundles


def test_devices_that_are_gone_before_they_were_asked_for_leave_nothing_behind(monkeypatch):
    ray = Ray(monkeypatch, a=Free(1, H200), b=Free(0, H200))
    job = running(8)
    with pytest.raises(DevicesMissing, match=r"needs 1 free GPU \(b\) devices"):
        take(job, [A[2], B[0]])
    assert ray.removed == ["group 1"]
    assert sorted(job.bundles) == A[:2]
    assert not job.joined

"""Weights on other hosts: every party gets what its engines need, whatever the order of arrival."""

import pickle
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import vllm_cases
from vllm_cases import ONE, PP2, TP2

from nereus_adapters.rollout.mirror import shipments

pytestmark = pytest.mark.real

SOURCES, HOSTS = ("source0", "source1"), ("host0", "host1")
PARTY = Path(vllm_cases.__file__).with_name("mirror_parties.py")


def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running(parties):
    """Run parties in processes that hold what they received; give what became of each."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(PARTY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in parties
    ]

    here = threading.Barrier(len(parties))

    def one(told, process):
        assert pickle.load(process.stdout) == "here"
        here.wait(120)  # none begins to wait for another that is still importing
        pickle.dump(told, process.stdin)
        process.stdin.flush()
        return pickle.load(process.stdout)

    late = threading.Timer(180, lambda: [p.kill() for p in processes])
    late.start()
    try:
        with ThreadPoolExecutor(len(parties)) as threads:
            try:
                found = threads.map(one, parties, processes)
                became = dict(zip([p["name"] for p in parties], found, strict=True))
            except BaseException:  # the others' threads are waited for
                for process in processes:
                    process.kill()
                raise
            yield became
    finally:
        late.cancel()
        for process in processes:
            process.communicate(timeout=30)


def told(published, wanted, *, timeout_s=60.0, names=(*SOURCES, *HOSTS)):
    """Write what each party is told; sources hold one stage of a pipeline each."""
    at = dict(zip(sorted(published.segments), SOURCES, strict=True))
    listed = shipments(published, at, wanted)
    address = ("127.0.0.1", port())
    return [
        {
            "name": name,
            "names": names,
            "address": address,
            "timeout_s": timeout_s,
            "late_s": 0.0,
            "shipments": listed,
        }
        for name in names
    ]


@pytest.mark.parametrize("order", [1, -1], ids=["as named", "the other way round"])
def test_engines_read_on_their_own_host_what_several_sources_sent(start, weights, order):
    published = weights.publish(1, PP2)
    parties = told(published, {"host0": [ONE], "host1": [TP2]})
    # Each party comes at another moment, and lists shipments and names in another order.
    for index, party in enumerate(parties[::order]):
        party["late_s"] = 0.4 * index
        party["shipments"] = party["shipments"][:: order if index % 2 else -order]
        party["names"] = party["names"][:: order if index % 2 else -order]
    with running(parties) as found:
        assert {outcome for outcome, _ in found.values()} == {"done"}
        asked = vllm_cases.prompts(2)
        for host, layout in (("host0", ONE), ("host1", TP2)):
            there = replace(published, pieces=found[host][1])
            assert there.num_bytes == published.num_bytes
            engine = start(layout)
            engine.update_weights(1, there.manifest(layout))
            tokens = [c.tokens for c in vllm_cases.respond(engine, asked)]
            assert tokens == [weights.greedy(p.tokens, 24)[0] for p in asked]
            engine.close()


def test_what_is_not_needed_is_not_sent(weights):
    published = weights.publish(1, PP2)
    at = dict(zip(sorted(published.segments), SOURCES, strict=True))
    listed = shipments(published, at, {"host0": [TP2], "source0": [ONE]})
    sent = {(s.source, s.target): s.num_bytes for s in listed}
    # An engine beside source0 needs only what source1 has; no pair sends a byte twice.
    assert set(sent) == {("source0", "host0"), ("source1", "host0"), ("source1", "source0")}
    assert sent["source0", "host0"] + sent["source1", "host0"] == published.num_bytes
    assert sent["source1", "source0"] == sent["source1", "host0"]


def test_a_party_that_does_not_come_is_named(weights):
    published = weights.publish(1, PP2)
    parties = told(published, {"host0": [ONE], "host1": [ONE]}, timeout_s=5.0)
    with running([p for p in parties if p["name"] != "host1"]) as found:
        assert {kind for kind, _ in found.values()} == {"WaitTimeout"}
    # Whoever serves the store gives up first, perhaps; it names the one that is late.
    assert any("host1 to join the group" in text for _, text in found.values())


def test_a_party_that_sends_nothing_is_named(weights):
    published = weights.publish(1, PP2)
    parties = told(published, {"host0": [ONE]}, timeout_s=5.0, names=(*SOURCES, "host0"))
    for party in parties:
        party["leaves"] = party["name"] == "source0"
    with running(parties) as found:
        pass
    assert found["host0"][0] == "WaitTimeout"
    assert "party source0 to send weights" in found["host0"][1]

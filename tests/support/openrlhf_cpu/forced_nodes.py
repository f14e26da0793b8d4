"""The second node of Ray in a job under test: drained, killed between steps, or amid one."""

import os
import time
from pathlib import Path

from forced_faults import once, own_pid

NODE = "127.0.0.2"


def strike(session, becomes):
    """Announce that the second node will leave, await or bring about its end, or let it come.

    A node that drains ends by itself when nothing of Ray is left there. Returns when Nereus can see
    what has become of it.
    """
    import ray
    from ray._raylet import GcsClient

    supply = session.controller._adapter._supply
    if becomes == "drained":
        (node_id,) = [n["NodeID"] for n in ray.nodes() if n["NodeManagerAddress"] == NODE]
        preempted, deadline_ms = 2, int((time.time() + 600) * 1000)  # DrainNodeReason of Ray
        client = GcsClient(address=ray.get_runtime_context().gcs_address)
        accepted, why = client.drain_node(node_id, preempted, "spot notice", deadline_ms)
        assert accepted, why
        look = supply.leaving
    elif becomes == "came":
        (Path(os.environ["OPENRLHF_TEST_SEEN"]).parent / "node-is-to-come").touch()
        look = _free_there
    else:
        if becomes == "killed":
            _kill_node()
        look = supply.gone
    deadline_s = time.monotonic() + 60
    while not look():
        assert time.monotonic() < deadline_s, f"node {NODE} {becomes}, and Ray does not say so"
        time.sleep(0.1)


def _free_there():
    from nereus_adapters.ray_bundles import free_by_node

    return NODE in (free := free_by_node()) and free[NODE].count == 2


def _pids_there(session):
    """Processes of ranks and engines on the second node; on a node that is lost all end at once."""
    import ray

    running = session.controller._adapter._running
    handles = [rank for (_, device), rank in running.ranks.items() if device.node == NODE]
    for unit, engine in running.engines.items():
        if any(device.node == NODE for device in running.alive[unit].devices):
            handles.append(engine)
    return ray.get([h.__ray_call__.remote(own_pid) for h in handles], timeout=60)


def _kill_node(pids=()):
    """End the raylet of the second node and these processes, without a word to anybody."""
    import psutil
    import ray

    # other jobs' Rays on this machine may have a node of that address too
    gcs = ray.get_runtime_context().gcs_address
    mine = {f"--node_ip_address={NODE}", f"--gcs-address={gcs}"}
    (raylet,) = [
        process
        for process in psutil.process_iter(["cmdline"])
        if (words := process.info["cmdline"] or [""])[0].endswith("raylet") and mine.issubset(words)
    ]
    for pid in pids:
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            process.kill()
    raylet.kill()


AMID = "killed amid "
killed_s = {}
"""When a node was killed in a step, by the step."""


def arm(session, step, part):
    """Let the second node be killed in the next step, in the middle of this part of it."""
    trainer, pids = session.controller._adapter._running.trainer, _pids_there(session)

    def kill(*_):
        _kill_node(pids)
        killed_s[step] = time.time()

    if part == "generation":  # the first response has come
        once(trainer.samples_generator, "_process_response_into_experience", kill)
    elif part == "experience":
        once(trainer.experience_maker, "make_experience", kill)
    else:
        begin = trainer.actor_model_group.async_run_method

        def begun(method_name, *args, **kwargs):
            if method_name == "broadcast_to_vllm" and step not in killed_s:
                kill()
            return begin(method_name, *args, **kwargs)

        trainer.actor_model_group.async_run_method = begun

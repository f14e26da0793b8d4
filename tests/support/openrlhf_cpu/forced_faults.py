"""What can be made to fail in a job under test, once; which are arranged is `forced`'s business."""

import os
import time
from pathlib import Path


def once(module, name, before):
    """Call ``before(*arguments)`` in front of the next call of a function, and never again."""
    original = getattr(module, name)

    def replaced(*args, **kwargs):
        setattr(module, name, original)
        before(*args)
        return original(*args, **kwargs)

    setattr(module, name, replaced)


def own_pid(actor):
    return os.getpid()


def _kill(handle):
    """End the process of an actor, and return when it has ended: Ray kills some time later."""
    import psutil
    import ray

    process = psutil.Process(ray.get(handle.__ray_call__.remote(own_pid), timeout=60))
    process.kill()
    _, left = psutil.wait_procs([process], timeout=60)
    assert not left, f"{process} does not end"


def killed_rank():
    from nereus_adapters.openrlhf import groups

    # before digests are compared: the last rank of the new group has its state, and dies
    once(groups, "_verify", lambda running, stage, handles, parked: _kill(handles[-1]))


def killed_engine():
    from nereus_adapters.openrlhf import engines

    once(engines, "tie", kill_an_engine)


def _stopped(actor):
    """Stop the core of an engine in a seat: it no longer answers. Says which processes it is.

    Workers go on, and see by a pipe that their core is gone.
    """
    import signal

    import psutil

    cores = [
        psutil.Process(p.pid) for p in actor.llm.engine_core.resources.engine_manager.processes
    ]
    pids = [p.pid for core in cores for p in (core, *core.children(recursive=True))]
    for core in cores:
        os.kill(core.pid, signal.SIGSTOP)
    return pids


def _note(pids):
    with Path(os.environ["OPENRLHF_TEST_SEEN"]).with_suffix(".pids").open("w") as lines:
        lines.write("\n".join(map(str, pids)))


def stop_before_broadcast(running, also_generator=False):
    """Stop an engine's actor in the next step, when its weights are about to come."""
    import signal

    import ray

    (engine, *_), group = running.engines.values(), running.trainer.actor_model_group
    begin = group.async_run_method

    def begun(method_name, *args, **kwargs):
        if method_name == "broadcast_to_vllm":
            group.async_run_method = begin
            pid = ray.get(engine.__ray_call__.remote(own_pid), timeout=60)
            os.kill(pid, signal.SIGSTOP)
            _note([pid])
            if also_generator:
                _kill_generator()
        return begin(method_name, *args, **kwargs)

    group.async_run_method = begun


def hung_engine():
    import ray

    from nereus_adapters.openrlhf import engines

    def stop_first(*_):
        engine = handles_of_engines[0]
        _note(ray.get(engine.__ray_call__.remote(_stopped), timeout=60))

    handles_of_engines = []

    def before_tie(running):
        handles_of_engines.extend(running.engines.values())
        once(engines, "ask", stop_first)

    once(engines, "tie", before_tie)


def kill_an_engine(running):
    _kill(next(iter(running.engines.values())))


def kill_a_rank_amid_training(running):
    """End the last rank of the actor in the next step, once it has been told to train."""
    from nereus_core.workload import ACTOR_TRAIN

    rank, group = running.handles(ACTOR_TRAIN)[-1], running.trainer.actor_model_group
    begin = group.async_run_method

    def begun(method_name, *args, **kwargs):
        refs = begin(method_name, *args, **kwargs)
        if method_name == "fit":
            group.async_run_method = begin
            os.kill(pid, signal.SIGKILL)
        return refs

    import signal

    import ray

    pid = ray.get(rank.__ray_call__.remote(own_pid), timeout=60)
    group.async_run_method = begun


def kill_the_generator(trainer):
    """End the generator's process once it generates: it holds the lock, and begins when the
    boundary that this is called in has ended."""
    import threading

    threading.Thread(target=_kill_amid_generation, args=(trainer.vllm_lock,), daemon=True).start()


def _kill_amid_generation(lock):
    import ray

    deadline_s = time.monotonic() + 60
    while not ray.get(lock.__ray_call__.remote(_is_held), timeout=60):
        assert time.monotonic() < deadline_s, "no generation after 60 s"
        time.sleep(0.01)
    _kill_generator()


def _kill_generator():
    import signal

    from ray._private.state import actors

    told = [one for one in actors().values() if one["ActorClassName"] == "GenerateSamplesActor"]
    (generator,) = told
    os.kill(generator["Pid"], signal.SIGKILL)


def _is_held(lock):
    return lock._lock.locked()


FAULTS = {
    "killed rank": killed_rank,
    "killed engine": killed_engine,
    "hung engine": hung_engine,
}
"""What OPENRLHF_TEST_FAULT may name: a function that arranges for the fault, once."""

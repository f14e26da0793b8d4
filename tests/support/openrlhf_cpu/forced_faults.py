"""What can be made to fail in a job under test, once; which are arranged is `forced`'s business."""

import os
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


def hung_broadcast():
    import ray

    from nereus_adapters.openrlhf import engines

    def stop_first(*_):
        engine = handles_of_engines[0]
        pids = ray.get(engine.__ray_call__.remote(_stopped), timeout=60)
        with Path(os.environ["OPENRLHF_TEST_SEEN"]).with_suffix(".pids").open("w") as lines:
            lines.write("\n".join(map(str, pids)))

    handles_of_engines = []

    def before_tie(running):
        handles_of_engines.extend(running.engines.values())
        once(engines, "ask", stop_first)

    once(engines, "tie", before_tie)


def kill_an_engine(running):
    _kill(next(iter(running.engines.values())))


FAULTS = {
    "killed rank": killed_rank,
    "killed engine": killed_engine,
    "hung engine": hung_broadcast,
}
"""What OPENRLHF_TEST_FAULT may name: a function that arranges for the fault, once."""

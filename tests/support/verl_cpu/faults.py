"""Faults inside verl's workers, asked for with ``VERL_CPU_FAULT``.

``kill-rank:5`` ends rank 1 as it sends state after step 5; ``refuse-join:4`` keeps the ranks of the
first new process group after step 4 from meeting; ``kill-sleeper:4`` ends the server of one replica
that sleeps out of service before the transition after step 4. The driver sends a function of this
module in place of the adapter's, so that it is found by its name in every worker.
"""

import os
from contextlib import suppress
from pathlib import Path

import ray

from nereus_adapters.verl import rebuild, shards
from nereus_core.errors import PrimitiveError

FAULTS = os.environ.get("VERL_CPU_FAULT", "").split(",")
_send, _join = shards.send, rebuild.join


def killed_send(worker, *args):
    """End the process of rank 1 as it is asked for its shards."""
    if os.environ.get("RANK") == "1":
        os._exit(1)
    return _send(worker, *args)


def refused_join(worker, rank, meet, seats):
    """Refuse the first meeting that any rank is called to; its port tells it from others."""
    first = Path(os.environ["VERL_CPU_WORK"]) / "refused"
    with suppress(FileExistsError), open(first, "x") as file:
        file.write(str(meet.port))
    if first.read_text() in ("", str(meet.port)):  # empty: another rank is writing it now
        raise PrimitiveError("the test refuses to let this rank meet the others")
    return _join(worker, rank, meet, seats)


def arm(step, adapter):
    """Break what is to break in the transition after a step; called in the driver."""
    if f"kill-sleeper:{step}" in FAULTS:
        first = adapter.rollouts._sleepers._kept[0].replica
        ray.kill(first.servers[0])
    shards.send = killed_send if f"kill-rank:{step}" in FAULTS else _send
    rebuild.join = refused_join if f"refuse-join:{step}" in FAULTS else _join

"""Faults inside verl's workers: ``VERL_CPU_FAULT=kill-rank`` while state is sent, ``refuse-join``.

The driver sends a function of this module in place of the adapter's, so that it is found by its
name in every worker.
"""

import os

from nereus_adapters.verl import rebuild, shards
from nereus_core.errors import PrimitiveError

FAULTS = os.environ.get("VERL_CPU_FAULT", "").split(",")
_send, _join = shards.send, rebuild.join


def killed_send(worker, *args):
    """End the process of rank 1 as it is asked for its shards."""
    if os.environ.get("RANK") == "1":
        os._exit(1)
    return _send(worker, *args)


def refused_join(worker, *args):
    """Refuse to meet the first time."""
    if not getattr(worker, "_refused", False):
        worker._refused = True
        raise PrimitiveError("the test refuses to let this rank meet the others")
    return _join(worker, *args)


if "kill-rank" in FAULTS:
    shards.send = killed_send
if "refuse-join" in FAULTS:
    rebuild.join = refused_join

"""Why a node of a draft waits for another. Spelled when it is read: `Draft.spelled`."""

from __future__ import annotations

from nereus_core.transition.graph import EdgeKind

Reason = tuple[EdgeKind, str, int]
"""The text with gaps, and the unit, or the mask of the devices, that it speaks of, as a number."""

GOES_ON = "goes on from {unit}"
READS = "reads {unit}"
READS_PARKED = "reads {unit}, parked in host memory"
READ_BEFORE_END = "{unit} is read before it ends"
STANDS_FIRST = "{unit} stands first"
STANDS_LAST = "{unit} stands until the others have gone"
RELEASED = "{devices} released by {by}, acquired by {to}"
MAKES_ROOM = "{devices} has room for it then"
BOTH_USE = "both use {devices}"

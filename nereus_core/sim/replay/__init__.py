"""A long run in simulated time, over what was seen elsewhere: lengths, devices, slow spells.

The controller, planner, compiler and executor are the real ones; only the job is imagined. It holds
no state, so that models of any size on a thousand devices take a moment. Its seconds come from a
`Truth` that the controller cannot see and has to learn.
"""

from nereus_core.sim.replay.adapter import ReplayAdapter
from nereus_core.sim.replay.job import ReplayJob
from nereus_core.sim.replay.trace import Trace
from nereus_core.sim.replay.truth import TransitionPace, Truth

__all__ = ["ReplayAdapter", "ReplayJob", "Trace", "TransitionPace", "Truth"]

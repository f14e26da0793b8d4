"""Transitions: compile a graph of primitives from units to a plan, and execute it."""

from nereus_core.transition.compile import compile_transition
from nereus_core.transition.execute import Outcome, execute
from nereus_core.transition.graph import Edge, EdgeKind, TransitionGraph
from nereus_core.transition.trace import chrome_trace, write_traces

__all__ = [
    "Edge",
    "EdgeKind",
    "Outcome",
    "TransitionGraph",
    "chrome_trace",
    "compile_transition",
    "execute",
    "write_traces",
]

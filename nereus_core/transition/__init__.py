"""Transitions: compile a graph of primitives from units to a plan, and execute it."""

from nereus_core.transition.compile import compile_transition
from nereus_core.transition.execute import Outcome, execute, execute_under, transact
from nereus_core.transition.graph import Edge, EdgeKind, Listed, TransitionGraph
from nereus_core.transition.journal import Journal, JournalCorrupt, Pending
from nereus_core.transition.run import Conditions
from nereus_core.transition.trace import chrome_trace, write_traces

__all__ = [
    "Conditions",
    "Edge",
    "EdgeKind",
    "Journal",
    "JournalCorrupt",
    "Listed",
    "Outcome",
    "Pending",
    "TransitionGraph",
    "chrome_trace",
    "compile_transition",
    "execute",
    "execute_under",
    "transact",
    "write_traces",
]

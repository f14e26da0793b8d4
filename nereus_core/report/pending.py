"""A transition that was begun and has not ended, in words: from the journal of a run's folder."""

from __future__ import annotations

from pathlib import Path

from nereus_core.attach import JOURNAL
from nereus_core.phases import Phase
from nereus_core.transition import Journal, Pending


def pending_in(run_dir: Path) -> Pending | None:
    """Return the transition that is pending in a run's folder; raises as the journal does."""
    return Journal.left_pending(run_dir / JOURNAL)


def explain_pending(pending: Pending) -> str:
    """Say how far it came, primitive by primitive, and what whoever goes on will do."""
    graph = pending.graph
    back = " back to the plan before" if pending.undoes else ""
    lines = [
        f"Transition {graph.name}{back} was begun and has not ended: it is running, or its "
        f"controller died. {len(pending.done)} of {len(graph.ops)} primitives are done."
    ]
    for op in graph.topological():
        phase = pending.phases.get(op.op_id)
        if op.op_id in pending.done:
            state = "done"
        elif phase is None:
            state = "not begun"
        else:
            state = f"in phase {phase}"
        lines.append(f"  {op.op_id}  {op}: {state}")
    lines.append(f"  {_outlook(pending)}")
    return "\n".join(lines)


def _outlook(pending: Pending) -> str:
    if pending.switched_to is not None:
        return "The epoch switch was announced: whoever goes on links the new plan again."
    late = [p for p in pending.phases.values() if p in (Phase.COMMIT, Phase.RELEASE)]
    if pending.done or late:
        return (
            "A controller that takes the job over (`nereus run ... --set backend.reattach=true`) "
            "reads from the units what was committed, and finishes the rest; without the job's "
            "processes, go on from a checkpoint with --resume."
        )
    return "Nothing was committed: the old plan goes on."

"""Experience: one experience maker over groups of different tensor-parallel degrees."""

from __future__ import annotations

import functools
import itertools
from typing import Any


def per_group(maker: Any) -> None:
    """Let an experience maker drop the doubles of each group by that group's own degree.

    Ranks of one tensor-parallel group return the same results. OpenRLHF keeps every n-th of all
    groups, n being the actor's degree; groups that changed alone have another one.
    """
    dispatch = maker._dispatch_forward

    @functools.wraps(dispatch)
    def dispatched(group: Any, sync_condition: Any, **kwargs: Any) -> list[Any]:
        refs: list[Any] = dispatch(group, sync_condition, **kwargs)
        return refs[:: group.duplicate_actors]

    def flattened(refs: Any, duplicate_factor: int) -> list[Any]:
        import ray

        # What was dispatched comes as a list, without doubles; a dummy of OpenRLHF's as one object.
        step = 1 if isinstance(refs, list) else duplicate_factor
        return list(itertools.chain.from_iterable(ray.get(refs)[::step]))

    maker._dispatch_forward, maker._flatten_results = dispatched, flattened

"""pipeline: pipeline stages inside the units of Nereus's own engine (`tensor_parallel`).

A unit of ``tp x pp`` ranks holds one copy of a model: stage after stage a run of its layers, each
shared by ``tp`` ranks. Importing this package imports neither torch nor verl.
"""

from __future__ import annotations

import json

STAGES_KEY = "NEREUS_PIPELINE_STAGES"
"""How many stages units of each role have when a job starts, in the environment of its processes:
a JSON object; 1 of a role that is not named."""
STAGES_FIELD = "nereus_pipeline_stages"
"""The same of one engine, beside ``fsdp_size`` in its configuration; counts before `STAGES_KEY`."""


def stages_at_start(told: str | None, role: str) -> int:
    """Read `STAGES_KEY`: stages of a unit of a role."""
    return int(json.loads(told or "{}").get(role, 1))

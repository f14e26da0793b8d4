"""pipeline: pipeline stages inside the units of Nereus's own engine (`tensor_parallel`).

A unit of ``tp x pp`` ranks holds one copy of a model: stage after stage a run of its layers, each
shared by ``tp`` ranks. Importing this package imports neither torch nor verl.
"""

from __future__ import annotations

STAGES_KEY = "NEREUS_PIPELINE_STAGES"
"""How many stages units have when a job starts, in the environment of its processes."""
STAGES_FIELD = "nereus_pipeline_stages"
"""The same of one engine, beside ``fsdp_size`` in its configuration; counts before `STAGES_KEY`."""

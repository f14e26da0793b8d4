"""What a framework asks of units: key/value heads that are cut, sequences in whole micro-batches."""

from dataclasses import replace

import pytest

from nereus_core.errors import LayoutError
from nereus_core.layout import Layout, layout_problems
from nereus_core.plan import check_stage_layout, plan_problems, stage_layout_problems
from nereus_core.planner.choices import choices_of

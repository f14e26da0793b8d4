"""StageTable: what many ways to run one model-stage take, all at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus_core.cost.compute import stage_work, sync_work
from nereus_core.cost.corrections import Between
from nereus_core.cost.curves import Curves
from nereus_core.cost.efficiency import EfficiencyTable
from nereus_core.cost.lengths import Lengths
from nereus_core.cost.memory import persistent_bytes, transient_bytes, wave_ladder
from nereus_core.cost.op_classes import FloatArray
from nereus_core.cost.peaks import Peaks
from nereus_core.cost.shapes import Options, RankShapes
from nereus_core.workload import Job, ModelStage


@dataclass(frozen=True, slots=True, eq=False)
class StageTable:
    """Seconds and bytes of many ways to run one model-stage; rows are options x waves."""

    stage: ModelStage
    options: Options
    waves: FloatArray
    work: FloatArray
    """Ideal seconds per class [row, class]."""
    sync_work: FloatArray
    seconds: FloatArray
    sync_s: FloatArray
    persistent_bytes: FloatArray
    transient_bytes: FloatArray

    def rows(self, start: int, end: int) -> StageTable:
        """Return some rows as a table of their own; nothing is copied."""
        at = slice(start, end)
        options = self.options.take(at)
        return StageTable(
            self.stage, options, self.waves[at], self.work[at], self.sync_work[at],
            self.seconds[at], self.sync_s[at], self.persistent_bytes[at], self.transient_bytes[at],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a job's devices and steps, beside its shapes."""

    efficiencies: EfficiencyTable
    between: Between
    peaks: Peaks
    curves: Curves


def stage_table(
    job: Job, stage: ModelStage, options: Options, lengths: Lengths, known: Known
) -> StageTable:
    """Price every option once per number of waves."""
    ladder = np.array(wave_ladder(job, stage), dtype=np.float64)
    # More rounds than sequences are as many as sequences: such rows are priced once.
    most = np.searchsorted(ladder, job.global_batch / options.dp)
    last = np.minimum(most, len(ladder) - 1)[:, None]
    at, wave = np.nonzero(np.arange(len(ladder)) <= last)
    first = np.cumsum(last.ravel() + 1) - last.ravel() - 1
    expand = (first[:, None] + np.minimum(np.arange(len(ladder)), last)).ravel()
    waves = ladder[wave]
    rows = options.take(at)
    shapes = RankShapes.of(job.model(stage), rows, by_rows=stage in job.row_cut)
    work = stage_work(job, stage, rows, shapes, lengths, waves, known.curves)
    sync = sync_work(job, stage, rows, shapes)
    return StageTable(
        stage,
        rows.take(expand),
        np.broadcast_to(ladder, (len(options), len(ladder))).ravel(),
        work[expand],
        sync[expand],
        known.efficiencies.table(stage, rows.tp, rows.pp, work)[expand],
        (sync @ known.efficiencies.inverse * known.between.sync_factor)[expand],
        persistent_bytes(job, stage, rows, shapes)[expand],
        (known.peaks.factor(stage) * transient_bytes(job, stage, rows, shapes, lengths, waves))[
            expand
        ],
    )

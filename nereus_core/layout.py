"""Layout(tp, pp) inside a unit: what divides, what does not, and which layouts there are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, Self

from nereus_core.errors import LayoutError
from nereus_core.model import ModelSpec
from nereus_core.workload import Job, ModelStage

Degrees = Literal["powers_of_two", "divisors"]


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """Tensor- and pipeline-parallel degrees of one unit; local rank = pp_rank * tp + tp_rank."""

    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1:
            raise ValueError(f"degrees are at least 1, got tp={self.tp} pp={self.pp}")

    def __str__(self) -> str:
        return f"tp{self.tp}pp{self.pp}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``tp2pp1``; raises ValueError on anything else."""
        tp, separator, pp = text.removeprefix("tp").partition("pp")
        if not (text.startswith("tp") and separator and tp.isdigit() and pp.isdigit()):
            raise ValueError(f"not a layout: {text!r}; expected e.g. 'tp2pp1'")
        return cls(int(tp), int(pp))

    @property
    def num_devices(self) -> int:
        """Devices one unit of this layout takes."""
        return self.tp * self.pp


def layout_problems(model: ModelSpec, layout: Layout) -> tuple[str, ...]:
    """Say why a model cannot have a layout, or return () when it can.

    Vocabulary and layers need not divide: a vocabulary is cut into ceil(V/tp) rows with a shorter
    last cut, layers into contiguous runs that differ by at most one. Key/value heads are cut, or
    replicated when tp is a multiple of their number.

    >>> from nereus_core.sim.models import TINY
    >>> layout_problems(TINY, Layout(3, 1))[0]
    'tp=3 does not divide num_heads=4'
    """
    tp, pp = layout.tp, layout.pp
    problems = _head_problems(model, tp)
    if model.intermediate % tp:
        problems.append(f"tp={tp} does not divide intermediate={model.intermediate}")
    if (tp - 1) * -(-model.vocab // tp) >= model.vocab:
        problems.append(f"tp={tp} leaves a rank without rows of vocab={model.vocab}")
    if pp > model.num_layers:
        problems.append(f"pp={pp} exceeds num_layers={model.num_layers}")
    return tuple(problems)


def _head_problems(model: ModelSpec, tp: int) -> list[str]:
    problems = []
    if model.num_heads % tp:
        problems.append(f"tp={tp} does not divide num_heads={model.num_heads}")
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        problems.append(
            f"tp={tp} neither divides num_kv_heads={model.num_kv_heads} nor is a multiple of it"
        )
    return problems


def stage_problems(job: Job, stage: ModelStage, layout: Layout) -> tuple[str, ...]:
    """Say why a model-stage of a job cannot have a layout, or return () when it can."""
    model = job.model(stage)
    if stage not in job.row_cut:
        problems = list(layout_problems(model, layout))
        if not problems and stage in job.kv_heads_cut and model.num_kv_heads % layout.tp:
            problems.append(f"tp={layout.tp} does not divide num_kv_heads={model.num_kv_heads}")
        most = job.most_stages.get(stage, layout.pp)
        if layout.pp > most:
            problems.append(f"pp={layout.pp} exceeds the {most} pipeline stages that it may have")
        return tuple(problems)
    problems = _head_problems(model, layout.tp) if job.sequence_parallel else []
    if layout.pp > 1:
        problems.append(f"pp={layout.pp}, and its state is cut by rows alone")
    return tuple(problems)


def stage_layouts(
    job: Job, stage: ModelStage, max_devices: int, degrees: Degrees = "powers_of_two"
) -> tuple[Layout, ...]:
    """Enumerate the layouts that a model-stage may have, as `layouts` does for a model."""
    if stage not in job.row_cut:
        known = layouts(job.model(stage), max_devices, degrees)
        if stage not in job.kv_heads_cut and stage not in job.most_stages:
            return known
        return tuple(layout for layout in known if not stage_problems(job, stage, layout))
    return tuple(
        layout
        for tp in _allowed(degrees, max_devices)
        if not stage_problems(job, stage, layout := Layout(tp, 1))
    )


def check_layout(model: ModelSpec, layout: Layout) -> None:
    """Raise LayoutError unless the model's shapes allow the layout."""
    if problems := layout_problems(model, layout):
        raise LayoutError(layout, model.name, problems)


@lru_cache(maxsize=64)
def layouts(
    model: ModelSpec, max_devices: int, degrees: Degrees = "powers_of_two"
) -> tuple[Layout, ...]:
    """Enumerate the layouts a model allows on at most ``max_devices``, sorted by (tp, pp).

    ``powers_of_two`` is the usual space of frameworks; ``divisors`` takes every tp that fits the
    model's heads and every pp up to its layers.
    """
    return tuple(
        Layout(tp, pp)
        for tp in _allowed(degrees, max_devices)
        if not layout_problems(model, Layout(tp, 1))
        for pp in _allowed(degrees, min(max_devices // tp, model.num_layers))
    )


def _allowed(degrees: Degrees, most: int) -> Iterable[int]:
    if degrees == "divisors":
        return range(1, most + 1)
    return (1 << k for k in range(most.bit_length()))


def layer_ranges(num_layers: int, pp: int) -> tuple[range, ...]:
    """Cut layers into ``pp`` contiguous runs; the first ``num_layers % pp`` hold one more.

    >>> layer_ranges(30, 4)
    (range(0, 8), range(8, 16), range(16, 23), range(23, 30))
    """
    short, longer = divmod(num_layers, pp)
    starts = [i * short + min(i, longer) for i in range(pp + 1)]
    return tuple(range(a, b) for a, b in pairwise(starts))

"""Traces for the replay benchmark, read from the validation data (see its README for sources).

    NEREUS_DATA=../shared/data python tests/benchmarks/scenarios/traces.py    # says what there is

The folder is read from ``NEREUS_DATA``; where it is absent, readers raise FileNotFoundError.
"""

from __future__ import annotations

import csv
import gzip
import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from nereus_core.sim.replay import Trace
from nereus_core.workload import ACTOR_GENERATE

ROOT = Path(__file__).parents[3]
SPOT = ("parcae_hh_55_65", "parcae_lh_80_90", "parcae_hl_15_25", "parcae_ll_10_11", "bamboo_p3")
_QUANTILES = 200
"""Response lengths that a distribution is kept as."""


def folder() -> Path:
    """The validation data; raises FileNotFoundError saying where it was looked for."""
    found = Path(os.environ.get("NEREUS_DATA", ROOT.parent / "shared" / "data"))
    if not found.is_dir():
        raise FileNotFoundError(f"no validation data in {found}; set NEREUS_DATA")
    return found


def shape(name: str = "azure_2023_conv") -> tuple[float, ...]:
    """Response lengths of an LLM service as factors of their mean, in order."""
    with gzip.open(folder() / "lengths" / f"{name}.csv.gz", "rt") as lines:
        tokens = [int(row["GeneratedTokens"]) for row in csv.DictReader(lines)]
    at = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    return tuple(float(q) for q in np.quantile(tokens, at) / np.mean(tokens))


def verl(name: str, scale: float = 1.0, every: int = 1) -> Trace:
    """A verl run's mean lengths, and how fast it generated per token against its own median.

    Args:
        name: file in ``verl_logs``.
        scale: factor on response lengths: a run limited to 1,024 tokens stands for a longer one.
        every: take each so many-th step.
    """
    with (folder() / "verl_logs" / f"{name}.csv").open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["response_length/mean"]]
    rows = rows[::every]
    mean = np.array([float(row["response_length/mean"]) for row in rows])
    prompt = np.array([float(row["prompt_length/mean"]) for row in rows])
    update = np.array([float(row["timing_s/update_actor"]) for row in rows])
    generate = np.array([float(row["timing_s/gen"]) for row in rows])
    # Against the update of the same step, which does the same tokens: lengths cancel.
    pace = generate / update
    pace /= np.median(pace)
    scaled = "" if scale == 1 else f", response lengths x {scale:g}"
    return Trace(
        f"verl-{name}{'' if scale == 1 else f'-x{scale:g}'}",
        f"verl_logs/{name}.csv: mean lengths by step{scaled}; generation's pace against the "
        "update's; distribution within a step: lengths/azure_2023_conv",
        tuple(float(m) for m in mean * scale),
        tuple(float(p) for p in prompt),
        shape(),
        slow={ACTOR_GENERATE: tuple(float(p) for p in pace)},
    )


def spot_nodes(name: str) -> list[frozenset[str]]:
    """Nodes of a spot cluster, minute by minute; numbered anew, lowest free number first."""
    path = folder() / "spot" / f"{name}.csv"
    events: list[tuple[int, str, list[str]]] = []
    for line in path.read_text().splitlines():
        time_ms, event, nodes = (*line.split(","), "")[:3]
        if time_ms.isdigit():
            events.append((int(time_ms) // 60_000, event, nodes.split()))
    places: dict[str, int] = {}
    minutes: list[frozenset[str]] = []
    for minute in range(events[-1][0] + 1):
        for _, event, nodes in (e for e in events if e[0] == minute):
            for node in nodes:
                if event == "add" and node not in places:
                    taken = set(places.values())
                    places[node] = next(i for i in range(10_000) if i not in taken)
                elif event not in ("add", "no-op"):
                    places.pop(node, None)
        minutes.append(frozenset(f"node{i}" for i in places.values()))
    return minutes


def spot(name: str, steps: int | None = None, mean: float = 2000.0) -> Trace:
    """A spot cluster under a job of steady lengths; one minute is one step.

    Leaving is announced a step before, as clouds do (two minutes on AWS). Minutes before the
    cluster has its first eight nodes are left out.
    """
    minutes = spot_nodes(name)
    first = next(i for i, nodes in enumerate(minutes) if len(nodes) >= 8)
    minutes = minutes[first:][:steps]
    return Trace(
        f"spot-{name}",
        f"spot/{name}.csv: nodes by minute, a minute is a step; lengths steady, distribution of "
        "lengths/azure_2023_conv",
        (mean,) * len(minutes),
        (512.0,) * len(minutes),
        shape(),
        nodes=tuple(minutes),
    )


def growing(name: str, sizes: Sequence[int], steps: int, mean: Iterable[float]) -> Trace:
    """A run whose devices grow in equal stretches through ``sizes`` (nodes): a scenario."""
    cuts = [round(i * steps / len(sizes)) for i in range(len(sizes) + 1)]
    nodes = [
        frozenset(f"node{i}" for i in range(size))
        for size, (a, b) in zip(sizes, pairwise(cuts), strict=True)
        for _ in range(a, b)
    ]
    lengths = tuple(mean)
    return Trace(
        name,
        f"made up: nodes {', '.join(map(str, sizes))} in equal stretches; distribution of "
        "lengths/azure_2023_conv",
        lengths,
        (512.0,) * steps,
        shape(),
        nodes=tuple(nodes),
    )


if __name__ == "__main__":
    for found in [verl("qwen2_7b_fsdp_8gpu"), *map(spot, SPOT)]:
        sizes = sorted({len(n) for n in found.nodes}) or ["all"]
        print(f"{found.name}: {found.num_steps} steps, nodes {sizes[0]} to {sizes[-1]}")

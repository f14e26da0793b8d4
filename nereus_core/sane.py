"""sane: the one place where what comes into the core from outside is checked.

A job description that makes no sense is an error at once. An observation that makes no sense in
part is freed of that part, which is counted and recorded: a wrong number must never become a wrong
plan without a word, and a single bad sensor must not end a run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from nereus_core.cluster import Device
from nereus_core.errors import JobError, ObservationError
from nereus_core.observation import QUANTILE_LEVELS, Observation, TokenStats
from nereus_core.workload import Job

_K = TypeVar("_K")


@dataclass(frozen=True, slots=True)
class Ignored:
    """A part of an observation that was left out."""

    field: str
    """Which, e.g. ``stage_s[actor/train]``."""
    value: str
    reason: str
    """What was expected instead."""


def check_job(job: Job) -> None:
    """Raise JobError unless sizes, rates and devices of a job make sense."""
    cluster = job.cluster
    positive: dict[str, float] = {
        "global_batch": job.global_batch,
        "micro_batch": job.micro_batch,
        "max_prompt_tokens": job.max_prompt_tokens,
        "max_response_tokens": job.max_response_tokens,
        f"{cluster.device_spec.name} peak_flops_per_s": cluster.device_spec.peak_flops_per_s,
        f"{cluster.device_spec.name} memory_bytes": cluster.device_spec.memory_bytes,
        f"{cluster.device_spec.name} memory_bytes_per_s": cluster.device_spec.memory_bytes_per_s,
        f"{cluster.device_spec.name} host_bytes_per_s": cluster.device_spec.host_bytes_per_s,
    }
    shared = {"unit_batch": job.unit_batch, "device_batch": job.device_batch}
    positive |= {name: n for name, n in shared.items() if n is not None}
    positive |= {f"sequence_ranks of {s}": n for s, n in job.sequence_ranks.items()}
    positive |= {f"most_stages of {s}": n for s, n in job.most_stages.items()}
    positive |= {f"micro_tokens of {s}": b.least for s, b in job.micro_tokens.items()}
    at_least_0 = {f"{cluster.device_spec.name} launch_s": cluster.device_spec.launch_s}
    for where, link in (("intra_node", cluster.intra_node), ("inter_node", cluster.inter_node)):
        positive[f"{where} {link.name} bytes_per_s"] = link.bytes_per_s
        at_least_0[f"{where} {link.name} latency_s"] = link.latency_s
    problems = [f"{k} is {v}" for k, v in positive.items() if not (_finite(v) and v > 0)]
    problems += [f"{k} is {v}" for k, v in at_least_0.items() if not (_finite(v) and v >= 0)]
    if not cluster.devices:
        problems.append("the cluster has no device")
    if twice := {d for d in cluster.devices if cluster.devices.count(d) > 1}:
        problems.append(f"{min(twice)} is listed twice")
    if missing := sorted({s.model for s in job.workload.stages} - set(job.models)):
        problems.append(f"there is no model for {', '.join(missing)}")
    named = {*job.row_cut, *job.kv_heads_cut, *job.logits_whole}
    named |= {*job.sequence_ranks, *job.micro_tokens, *job.most_stages}
    if strange := sorted(named - set(job.workload.stages)):
        problems.append(f"{strange[0]} is cut or shared, and is no stage of the job")
    if job.sequence_ranks and job.device_batch is None:
        problems.append("sequence_ranks go with device_batch, which is None")
    if problems:
        raise JobError(problems)


def sane(seen: Observation, job: Job, last_step: int) -> tuple[Observation, tuple[Ignored, ...]]:
    """Free an observation of what makes no sense.

    Args:
        seen: what the adapter reported.
        job: whose stages and devices it may name.
        last_step: number of the last completed step seen before.

    Returns:
        The observation without its wrong parts, and what they were. Timings that are left out teach
        nothing; token counts that are left out leave lengths as they were.

    Raises:
        ObservationError: no device of the job is reported healthy.
    """
    found: list[Ignored] = []
    stages, devices = set(job.workload.stages), set(job.cluster.devices)

    def kept(
        name: str, values: Mapping[_K, float], known: Collection[_K] | None
    ) -> dict[_K, float]:
        good = {}
        for key, value in values.items():
            where = f"{name}[{key}]"
            if known is not None and key not in known:
                found.append(Ignored(where, f"{value}", f"the job has no such {_NOUN[name]}"))
            elif not (_finite(value) and value >= 0):
                found.append(Ignored(where, f"{value}", "expected a finite number, at least 0"))
            elif name == "efficiency" and not 0 < value <= 1:
                found.append(Ignored(where, f"{value}", "expected a part of the peak, in (0, 1]"))
            else:
                good[key] = value
        return good

    def among(name: str, named: frozenset[Device]) -> frozenset[Device]:
        unknown = sorted(named - devices)
        found.extend(Ignored(name, f"{d}", "the job has no such device") for d in unknown)
        return named.difference(unknown)

    def counts(name: str, tokens: TokenStats) -> TokenStats:
        figures = (tokens.mean, tokens.p50, tokens.p95, tokens.max, tokens.count)
        if all(_finite(v) and v >= 0 for v in figures) and tokens.mean <= tokens.max:
            shape = tokens.quantiles
            if not shape or _is_shape(shape):
                return tokens
            expected = f"{len(QUANTILE_LEVELS)} finite counts in rising order, at least 0"
            found.append(Ignored(f"{name}.quantiles", f"{shape}", f"expected {expected}"))
            return replace(tokens, quantiles=())
        found.append(Ignored(name, f"{tokens}", "expected finite counts, at least 0"))
        return TokenStats.of([])

    step_s = seen.step_s
    if not (_finite(step_s) and step_s >= 0):
        found.append(Ignored("step_s", f"{step_s}", "expected a finite number, at least 0"))
        step_s = 0.0
    if seen.step < last_step:
        found.append(Ignored("step", f"{seen.step}", f"step {last_step} has been seen before it"))
    clip = seen.clip_ratio
    if clip is not None and not (_finite(clip) and 0 <= clip <= 1):
        found.append(Ignored("clip_ratio", f"{clip}", "expected a part, in [0, 1]"))
        clip = None
    healthy = among("healthy", seen.healthy)
    if not healthy:
        raise ObservationError(
            f"none of the job's {len(devices)} devices is reported healthy after step {seen.step}; "
            "the adapter has to name those that the job still has"
        )
    clean = replace(
        seen,
        step_s=step_s,
        stage_s=kept("stage_s", seen.stage_s, stages),
        prompt_tokens=counts("prompt_tokens", seen.prompt_tokens),
        response_tokens=counts("response_tokens", seen.response_tokens),
        peak_bytes={d: int(b) for d, b in kept("peak_bytes", seen.peak_bytes, devices).items()},
        healthy=healthy,
        draining=among("draining", seen.draining),
        efficiency=kept("efficiency", seen.efficiency, None),
        clip_ratio=clip,
    )
    return clean, tuple(found)


_NOUN = {"stage_s": "model-stage", "peak_bytes": "device"}


def _is_shape(quantiles: tuple[float, ...]) -> bool:
    """Whether these can be the token counts at `QUANTILE_LEVELS`."""
    known = len(quantiles) == len(QUANTILE_LEVELS) and all(map(_finite, quantiles))
    return known and quantiles[0] >= 0 and all(a <= b for a, b in pairwise(quantiles))


def _finite(value: float) -> bool:
    return math.isfinite(value)

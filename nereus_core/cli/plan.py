"""``nereus plan``: the plan Nereus would choose for a model and a cluster, without running it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nereus_core.capabilities import Capabilities
from nereus_core.cli.outcome import print_json
from nereus_core.cluster import Cluster, Device
from nereus_core.config import ConstraintsConfig, validated
from nereus_core.cost import CostModel
from nereus_core.cost.lengths import Lengths
from nereus_core.errors import ConfigError
from nereus_core.model import ModelSpec
from nereus_core.planner import Constraints, Planned, best
from nereus_core.registry import Registry
from nereus_core.report.quantities import amount, seconds
from nereus_core.workload import ALGORITHMS, PRECISIONS, Job

# The links that each device of the core's table is sold with (NVIDIA DGX guides).
_LINKS = {
    "a100-sxm-80gb": ("nvlink3", "ib-hdr"),
    "h100-sxm": ("nvlink4", "ib-ndr"),
    "h200-sxm": ("nvlink4", "ib-ndr"),
    "cpu-seat": ("loopback", "loopback"),
}


def plan(
    model: Annotated[
        Path, typer.Option("--model", "-m", help="Hugging Face config.json, or folder.")
    ],
    algorithm: Annotated[str, typer.Option(help="ppo, grpo or remax.")] = "grpo",
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    devices_per_node: Annotated[int, typer.Option(min=1, help="Devices in each node.")] = 8,
    device: Annotated[str, typer.Option(help="Kind of device.")] = "h100-sxm",
    intra: Annotated[
        str | None, typer.Option(help="Link inside a node; the device's usual one.")
    ] = None,
    inter: Annotated[
        str | None, typer.Option(help="Link between nodes; the device's usual one.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 512,
    prompt: Annotated[int, typer.Option(min=1, help="Longest prompt, tokens.")] = 1024,
    response: Annotated[int, typer.Option(min=1, help="Longest response, tokens.")] = 2048,
    precision: Annotated[
        str, typer.Option(help="float64, float32 or bfloat16 (mixed).")
    ] = "bfloat16",
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences in one forward/backward.")] = 1,
    degrees: Annotated[str, typer.Option(help="powers_of_two or divisors.")] = "powers_of_two",
    max_tp: Annotated[
        int | None, typer.Option(min=1, help="Largest tensor-parallel degree.")
    ] = None,
    max_pp: Annotated[
        int | None, typer.Option(min=1, help="Largest pipeline-parallel degree.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Choose a plan for a model on a cluster, from its config.json alone.

    Prints the plan, predicted seconds of each model-stage, peak memory per device and the plans
    that came next. Nothing is started and no weights are read.

    For example:

      nereus plan --model ./Llama-3.1-8B --nodes 4 --batch 512 --response 2048

      nereus plan -m config.json --algorithm ppo --device a100-sxm-80gb --max-pp 1 --json
    """
    job = _job(
        model, algorithm, _cluster(nodes, devices_per_node, device, intra, inter),
        batch, prompt, response, precision, micro_batch,
    )  # fmt: skip
    limits = validated(
        ConstraintsConfig,
        {"degrees": degrees, "max_tp": max_tp, "max_pp": max_pp},
        at="constraints",
    )
    constraints = Constraints.of(limits, Capabilities.everything(), None)
    cost, lengths = CostModel(job), Lengths.of_job(job)
    start_s = time.monotonic()
    planned = best(cost, lengths, constraints)
    took_s = time.monotonic() - start_s
    memory = cost.memory(planned.best.plan, lengths)
    if as_json:
        print_json(_json(planned, memory, took_s))
    else:
        _show(planned, memory, job, took_s)


def _cluster(
    nodes: int, devices_per_node: int, device: str, intra: str | None, inter: str | None
) -> Cluster:
    devices, links = Registry.load().device_specs()
    if device not in devices:
        raise ConfigError("--device", f"no device {device!r}; known: {', '.join(devices)}")
    usual = _LINKS.get(device)
    names = [intra or (usual and usual[0]), inter or (usual and usual[1])]
    for option, name in zip(("--intra", "--inter"), names, strict=True):
        if name not in links:
            what = f"no link {name!r}" if name else f"device {device!r} has no usual link"
            raise ConfigError(option, f"{what}; known: {', '.join(links)}")
    return Cluster.homogeneous(
        nodes, devices_per_node, devices[device], links[str(names[0])], links[str(names[1])]
    )


def _job(
    model: Path, algorithm: str, cluster: Cluster, batch: int, prompt: int, response: int,
    precision: str, micro_batch: int,
) -> Job:  # fmt: skip
    if algorithm not in ALGORITHMS:
        raise ConfigError("--algorithm", f"got {algorithm!r}; known: {', '.join(ALGORITHMS)}")
    by_name = {str(name): value for name, value in PRECISIONS.items()}
    if precision not in by_name:
        raise ConfigError("--precision", f"got {precision!r}; known: {', '.join(by_name)}")
    spec = ModelSpec.from_hf_config(model)
    critic = spec.as_critic("critic")
    workload = ALGORITHMS[algorithm]()
    models = {s.model: critic if s.model == "critic" else spec for s in workload.stages}
    return Job(workload, models, cluster, batch, prompt, response, by_name[precision], micro_batch)


def _json(planned: Planned, memory: Mapping[Device, int], took_s: float) -> dict[str, object]:
    step = planned.best.step
    return {
        "plan": planned.best.plan.to_json(),
        "predicted_s": dataclasses.asdict(step.step),
        "stage_s": {str(stage): value for stage, value in step.stage_s.items()},
        "memory_bytes": {str(device): value for device, value in memory.items()},
        "runner_ups": [
            {"plan": r.plan.to_json(), "predicted_s": r.predicted_s, "reason": r.reason}
            for r in planned.runner_ups
        ],
        "searched": planned.searched,
        "search_s": took_s,
    }


def _show(planned: Planned, memory: Mapping[Device, int], job: Job, took_s: float) -> None:
    console, step = Console(), planned.best.step
    console.print(
        f"[bold]{seconds(step.step.mean_s)}[/bold] per RL step "
        f"({seconds(step.step.low_s)} to {seconds(step.step.high_s)}), predicted; "
        f"{planned.searched:,} plans weighed in {seconds(took_s)}\n",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("MODEL-STAGE", "LAYOUT", "DP", "DEVICES", "PREDICTED", "PEAK MEMORY"):
        table.add_column(name)
    capacity = job.cluster.device_spec.memory_bytes
    for stage, placement in planned.best.plan.items():
        peak = max(memory[d] for d in placement.devices)
        table.add_row(
            str(stage), str(placement.layout), str(placement.dp), _devices(placement.devices),
            seconds(step.stage_s.get(stage)),
            f"{amount(peak)} of {amount(capacity)}",
        )  # fmt: skip
    console.print(table)
    if planned.runner_ups:
        console.print("\n[bold]Runner-ups[/bold]")
        # Plans that differ only in which devices they take read alike: the first stands for them.
        unlike = {str(other.plan): other for other in reversed(planned.runner_ups)}
        for other in reversed(unlike.values()):
            console.print(
                f"  {seconds(other.predicted_s):>9}  {escape(str(other.plan))}\n"
                f"             {escape(other.reason)}",
                highlight=False,
                soft_wrap=True,
            )


def _devices(devices: Iterable[Device]) -> str:
    """Write devices as ranges per node: ``node0:0-7 node1:0-3``; equal nodes are joined.

    >>> _devices([Device("node0", 0), Device("node0", 1), Device("node1", 0), Device("node1", 1)])
    'node0-node1:0-1'
    """
    by_node = {
        node: _ranges(sorted(d.index for d in members))
        for node, members in groupby(sorted(devices), key=lambda d: d.node)
    }
    parts = []
    for text, nodes in groupby(by_node, key=lambda n: by_node[n]):
        names = list(nodes)
        parts.append(f"{names[0]}{f'-{names[-1]}' if len(names) > 1 else ''}:{text}")
    return " ".join(parts)


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for value in numbers:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)

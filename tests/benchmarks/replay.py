"""Policies of admission over the same traces, in simulated time: every figure is *simulated*.

The controller, planner, transition compiler and executor are the real ones. The job is imagined
(`nereus_core.sim.replay`): its efficiencies, a factor of every layout, noise and drift are hidden
from the controller, which starts from its conservative prior. Nothing is tuned per trace: all
policies run with the default configuration, and start from the same plan.

* ``traces``: T5. Bars: payback never slower than the fixed layout with DP scaling
  (``dp-scaling-only``) or, over four seeds, than DynaRL-style admission (``saving>0``); at least
  20% below the former where lengths grow as the paper has them, 8B PPO to 16k tokens and more.
  `cases` says how the traces were chosen.
* ``growth_to_1024``: T6. Bar: transitions take at most 0.1% of a 1,000-step run that grows to
  1,024 GPUs in six.
* ``algorithms``: T12. Start-up configurations of verl-like and OpenRLHF-like placement
  (`scenarios.starts`) against a run of Nereus that starts from each.

    NEREUS_DATA=../shared/data python tests/benchmarks/replay.py [--json] [--quick]
                                      [--only length-growth-16k] [--parts growth_to_1024]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from scenarios import starts, traces

from nereus_core.cluster import Cluster, DeviceSpec, LinkSpec
from nereus_core.config import Admission, NereusConfig
from nereus_core.controller import Controller
from nereus_core.cost import CostModel, Lengths
from nereus_core.cost.op_classes import OpClass
from nereus_core.device_specs import H100_SXM, INFINIBAND_HDR, INFINIBAND_NDR, NVLINK4
from nereus_core.events import Decided, Event, EventLog
from nereus_core.observation import Observation
from nereus_core.plan import Plan
from nereus_core.planner import Constraints, best
from nereus_core.runner import drive
from nereus_core.sim.models import LLAMA_3_1_8B, QWEN2_5_7B
from nereus_core.sim.replay import ReplayAdapter, ReplayJob, Trace, TransitionPace, Truth
from nereus_core.workload import ALGORITHMS, BFLOAT16_MIXED, Job

A100_PCIE = DeviceSpec(
    "a100-pcie-80gb", 312e12, 80 * 2**30, 1.935e12, 1.5e-6, 32e9,
    "NVIDIA A100 80GB PCIe datasheet (2021): 312 TFLOP/s bf16 dense, 1,935 GB/s, PCIe 4.0 x16",
)  # fmt: skip
PCIE4 = LinkSpec("pcie4", 32e9, 5e-6, "PCI Express 4.0 x16, one direction")

EFFICIENCIES: Mapping[OpClass, float] = {
    OpClass.GEMM: 0.5,
    OpClass.GEMM_DECODE: 0.6,
    OpClass.ATTENTION_PREFILL: 0.35,
    OpClass.ATTENTION_DECODE: 0.5,
    OpClass.MEMORY_BOUND: 0.7,
    OpClass.HEAD: 0.45,
    OpClass.ALL_REDUCE_INTRA: 0.65,
    OpClass.ALL_REDUCE_INTER: 0.5,
    OpClass.ALL_GATHER_INTRA: 0.6,
    OpClass.ALL_GATHER_INTER: 0.5,
}
"""The world's own; chosen, unlike the controller's prior in every class. verl_logs reports an actor
MFU of 0.24 to 0.37 for whole updates, communication and optimizer included."""
PACE = TransitionPace(
    primitive_s=0.1,
    link_efficiency=0.1,
    source="tests/benchmarks/transfer.py --quick on CPU seats of a busy machine: a primitive that "
    "moves nothing took 0.03 to 0.08 s, and state crossed at 0.06 to 0.13 of the rate at which the "
    "same machine copies (0.15 to 0.63 of 1.9 to 4.7 GB/s); that part of the peak is charged on "
    "NVLink, PCIe and InfiniBand",
)
"""Charged to every policy alike."""
DUEL_SEEDS = (0, 1, 2, 3)
"""Of the comparison with "saving > 0"; the first four."""

Start = Callable[[CostModel], Plan]


@dataclass(frozen=True, slots=True)
class Case:
    """A trace, the job that goes through it, and how it was started."""

    name: str
    job: Job
    trace: Trace
    start: Start

    def started(self, truth: Truth) -> Plan:
        """The start-up plan on the devices of the first step."""
        cluster = self.job.cluster
        there = self.trace.offered(0, cluster.devices)
        job = self.job.on(cluster.without(set(cluster.devices) - there))
        return self.start(truth.model(job))


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a case under a policy."""

    step_s: float
    """Seconds per step over the run, transitions included."""
    transitions: int
    transition_percent: float
    infeasible_steps: int
    decisions: int
    decision_ms: float
    """Median thinking time of a decision, on this machine."""
    plan: str
    """The last one."""

    def row(self) -> dict[str, object]:
        """Rounded, for printing."""
        return {
            "s_per_step": round(self.step_s, 3),
            "transitions": self.transitions,
            "transition_percent": round(self.transition_percent, 4),
            "infeasible_steps": self.infeasible_steps,
            "decisions": self.decisions,
            "decision_ms": round(self.decision_ms, 1),
        }


def run(
    case: Case, policy: Admission, seed: int = 0, tell: Callable[[Event], None] = lambda e: None
) -> Run:
    """Run a case to its end under a policy, with the default configuration."""
    truth = Truth(EFFICIENCIES, PACE, seed)
    job = ReplayJob(case.job, case.started(truth), case.trace, truth)
    adapter, thought = ReplayAdapter(job), []
    with EventLog(None, job.clock_s) as log:
        log.subscribe(lambda event, at_s: tell(event))
        log.subscribe(
            lambda event, at_s: (
                thought.append(event.decision_s) if isinstance(event, Decided) else None
            )
        )
        config = NereusConfig.of({"verify": "off", "policy": {"admission": policy}})
        controller = Controller(adapter, config, log, lambda hook, **values: None, job.clock_s)
        drive(job, controller.at_boundary)
    return Run(
        job.clock_s() / job.steps,
        adapter.transitions,
        100 * adapter.transition_s / job.clock_s(),
        job.infeasible_steps,
        len(thought),
        1e3 * statistics.median(thought or [0.0]),
        str(controller.plan),
    )


def cluster(nodes: int, spec: DeviceSpec = H100_SXM) -> Cluster:
    """Nodes of eight."""
    intra, inter = (NVLINK4, INFINIBAND_NDR) if spec is H100_SXM else (PCIE4, INFINIBAND_HDR)
    return Cluster.homogeneous(nodes, 8, spec, intra, inter)


def job(
    algorithm: str,
    where: Cluster,
    *,
    batch: int = 1024,
    limit: int = 8192,
    asynchronous: bool = False,
) -> Job:
    """An 8B job (7B for GRPO, as in verl_logs)."""
    model = QWEN2_5_7B if algorithm == "grpo" else LLAMA_3_1_8B
    models = {"actor": model, "ref": model, "critic": model.as_critic("critic")}
    workload = ALGORITHMS[algorithm](asynchronous=asynchronous)
    return Job(workload, models, where, batch, 1024, limit, BFLOAT16_MIXED)


def cases(quick: bool) -> list[Case]:
    """The traces of T5; quick: every fourth step of a log, two spot clusters.

    Chosen by rule, and all reported. Growth of lengths: the one long log there is, whose limit of
    1,024 tokens stands for a run's limit of 8k, 16k and 32k (means from 1.6k to 5k, 3k to 11k, 6k
    to 21k tokens), on two clusters; and both logs as they are. Devices: every spot trace.
    """
    fsdp, megatron = "qwen2_7b_fsdp_8gpu", "qwen2_7b_megatron_tp2pp2_8gpu"
    every = 4 if quick else 1
    found = [
        Case(f"length-growth-{scale}k-{name}", job("ppo", cluster(4, spec), limit=1024 * scale),
             traces.verl(fsdp, scale, every), starts.hybrid)
        for scale in (8, 16, 32)
        for name, spec in (("pcie", A100_PCIE), ("nvlink", H100_SXM))
    ]  # fmt: skip
    found += [
        Case("length-growth-as-logged", job("grpo", cluster(1), batch=5120, limit=1024),
             traces.verl(fsdp, 1, every), starts.hybrid),
        Case("length-shrink-as-logged", job("grpo", cluster(1), batch=5120, limit=1024),
             traces.verl(megatron, 1, every), starts.hybrid),
    ]  # fmt: skip
    spots = [traces.spot(name, 120) for name in traces.SPOT[: 2 if quick else None]]
    return found + [Case(t.name, job("grpo", cluster(32)), t, starts.hybrid) for t in spots]


def oracle_s(case: Case, seed: int) -> float:
    """Mean seconds of plans that are chosen anew for every step by the world's own efficiencies.

    Transitions cost it nothing and it learns nothing: about the most that any policy can reach.
    It does not know the factors of layouts, which a policy may come to know. Of long traces, every
    third step.
    """
    truth, total_s = Truth(EFFICIENCIES, PACE, seed), []
    devices = case.job.cluster.devices
    for step in range(0, case.trace.num_steps, 3):
        there = case.trace.offered(step, devices)
        now = case.job.on(case.job.cluster.without(set(devices) - there))
        responses, _ = case.trace.responses(step, now, seed)
        prompts = case.trace.prompts(step, now)
        seen = Observation(step, 0.0, {}, prompts, responses, {}, there)
        lengths = Lengths.of(seen)
        plan = best(truth.model(now), lengths, Constraints()).best.plan
        total_s.append(truth.step(now, plan, lengths, step, case.trace)[0])
    return statistics.fmean(total_s)


def compare(case: Case, seeds: Sequence[int]) -> dict[str, object]:
    """All policies over one case; seconds per step are means over seeds."""
    policies, runs = {}, dict[str, list[float]]()
    for policy in get_args(Admission):
        found = [run(case, policy, seed) for seed in seeds]
        runs[policy] = [each.step_s for each in found]
        policies[policy] = replace(found[0], step_s=statistics.fmean(runs[policy]))
    ours, fixed = policies["payback"].step_s, policies["dp-scaling-only"].step_s
    possible = statistics.fmean(oracle_s(case, seed) for seed in seeds)
    return {
        "source": case.trace.source,
        "steps": case.trace.num_steps,
        "policies": {name: found.row() for name, found in policies.items()},
        "below_fixed_percent": round(100 * (1 - ours / fixed), 2),
        "oracle_below_fixed_percent": round(100 * (1 - possible / fixed), 2),
        "against_saving": duel(case, runs["payback"], runs["saving>0"], seeds),
        "worst_against_percent": round(
            max(100 * (ours / r.step_s - 1) for n, r in policies.items() if n != "payback"), 2
        ),
    }


def duel(
    case: Case, ours_s: Sequence[float], theirs_s: Sequence[float], seeds: Sequence[int]
) -> dict[str, object]:
    """Hold payback against "saving > 0" over `DUEL_SEEDS`.

    One change of plan a step earlier or later is worth more than the rules differ by, so one or
    two seeds decide nothing.

    Args:
        case: the trace.
        ours_s: seconds per step with the seeds already run.
        theirs_s: likewise.
        seeds: those; a single one (--quick) is all there is then.
    """
    more = [seed for seed in DUEL_SEEDS if seed not in seeds] if len(seeds) > 1 else []
    ours = [*ours_s, *(run(case, "payback", seed).step_s for seed in more)]
    theirs = [*theirs_s, *(run(case, "saving>0", seed).step_s for seed in more)]
    each = [100 * (a / b - 1) for a, b in zip(ours, theirs, strict=True)]
    error = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else None
    return {
        "percent": round(100 * (sum(ours) / sum(theirs) - 1), 4),
        "standard_error": None if error is None else round(error, 4),
        "by_seed": [round(percent, 4) for percent in each],
    }


def growth_to_1024(quick: bool) -> dict[str, object]:
    """T6: 1,000 steps of steady lengths, from 16 to 1,024 GPUs in six growths."""
    steps = 100 if quick else 1000
    mean = [2000.0] * steps
    sizes = (2, 4, 8, 16, 32, 64, 128)
    trace = traces.growing("growth-to-1024", sizes, steps, mean)
    case = Case("growth-to-1024", job("ppo", cluster(128), batch=4096), trace, starts.hybrid)
    return {"steps": steps, "gpus": [8 * n for n in sizes], **run(case, "payback").row()}


def algorithms(quick: bool) -> dict[str, object]:
    """T12: seconds per step of fixed start-up configurations over Nereus started from the same."""
    found: dict[str, object] = {}
    kinds = (("ppo", False), ("remax", False), ("grpo", False), ("grpo", True))
    log = traces.verl("qwen2_7b_fsdp_8gpu", 8, 12 if quick else 4)
    for name, asynchronous in kinds:
        rows = {}
        for style, start in (("verl-like", starts.hybrid), ("openrlhf-like", starts.split)):
            if asynchronous and start is starts.hybrid:
                continue  # a hybrid engine cannot generate while it trains
            each = job(name, cluster(4), asynchronous=asynchronous)
            case = Case(style, each, log, start)
            fixed, ours = run(case, "never"), run(case, "payback")
            rows[style] = {
                "fixed_s_per_step": round(fixed.step_s, 2),
                "nereus_s_per_step": round(ours.step_s, 2),
                "throughput_ratio": round(fixed.step_s / ours.step_s, 3),
                "latency_percent": round(100 * (ours.step_s / fixed.step_s - 1), 1),
                "start": str(case.started(Truth(EFFICIENCIES, PACE))),
                "end": ours.plan,
            }
        found[f"{name}{' async' if asynchronous else ''}"] = rows
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="shorter traces, one seed")
    parser.add_argument("--only", default="", help="traces whose name contains this")
    parser.add_argument("--parts", default="traces,growth_to_1024,algorithms")
    asked = parser.parse_args()
    begin_s = time.perf_counter()
    parts = {"traces"} if asked.only else set(asked.parts.split(","))
    try:
        chosen = [c for c in cases(asked.quick) if asked.only in c.name]
    except FileNotFoundError as error:
        print(json.dumps({"skipped": str(error)}) if asked.json else f"skipped: {error}")
        return
    seeds = (0,) if asked.quick else (0, 1)
    result: dict[str, object] = {"label": "simulated", "transition_pace": PACE.source}
    compared = {}
    for case in chosen if "traces" in parts else ():
        compared[case.name] = compare(case, seeds)
        print(case.name, time.perf_counter() - begin_s, file=sys.stderr)
    result["traces"] = compared
    if "growth_to_1024" in parts:
        result["growth_to_1024"] = growth_to_1024(asked.quick)
    if "algorithms" in parts:
        result["algorithms"] = algorithms(asked.quick)
    if asked.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)


def show(result: Mapping[str, Any]) -> None:
    """Print tables."""
    console = Console()
    head = ("policy", "s/step", "transitions", "in transitions", "infeasible", "decision")
    for name, found in result["traces"].items():
        table = Table(
            *head,
            title=f"{name} (simulated), {found['steps']} steps: payback "
            f"{found['below_fixed_percent']}% below the fixed layout with DP scaling (an oracle: "
            f"{found['oracle_below_fixed_percent']}%), "
            f"{found['against_saving']['percent']:+}% against saving > 0, "
            f"{found['worst_against_percent']:+}% against the best other policy",
        )
        for policy, row in found["policies"].items():
            table.add_row(
                policy,
                f"{row['s_per_step']}",
                f"{row['transitions']}",
                f"{row['transition_percent']}%",
                f"{row['infeasible_steps']} steps",
                f"{row['decision_ms']} ms",
            )
        console.print(table)
    if "growth_to_1024" in result:
        console.print("growth to 1,024 GPUs (simulated):", result["growth_to_1024"])
    if "algorithms" in result:
        table = Table("algorithm", "started as", "fixed s/step", "Nereus s/step", "throughput",
                      title="start-up configurations (simulated)")  # fmt: skip
        for name, styles in result["algorithms"].items():
            for style, row in styles.items():
                figures = (row["fixed_s_per_step"], row["nereus_s_per_step"])
                table.add_row(name, style, *map(str, figures), f"x {row['throughput_ratio']}")
        console.print(table)


if __name__ == "__main__":
    main()

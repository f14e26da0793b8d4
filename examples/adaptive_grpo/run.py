"""Run the job twice, adaptive and under its fixed start-up plan, and compare them in one report.

    tox run -e demo
    python examples/adaptive_grpo/run.py --quick      # a tiny random Llama on 4 seats, a minute

Exit code 1 when a run fails, or when the adaptive run did not change its plan.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nereus_core.config import NereusConfig
from nereus_core.events import (
    Decided,
    Event,
    PrimitiveFinished,
    StepObserved,
    TransitionFinished,
    read_events,
)
from nereus_core.report.html import write_report

HERE = Path(__file__).resolve().parent


def run(config: Path, run_dir: Path, *options: str) -> list[Event]:
    """Run a job by the command line that users have, and return its events."""
    events = run_dir / "events.jsonl"
    events.unlink(missing_ok=True)
    command = [sys.executable, "-m", "nereus_core.cli", "run", str(config)]
    subprocess.run(
        [*command, "--run-dir", str(run_dir), *options],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    return [event for event, _ in read_events(events)]


def comparison(adaptive: list[Event], fixed: list[Event]) -> Table:
    """Put both runs side by side, step by step."""
    table = Table(title="The same job, adaptive and under its fixed start-up plan")
    columns = ("step", "adaptive s", "fixed s", "loss", "fixed loss", "|difference|", "reward")
    for column in columns:
        table.add_column(column, justify="right")
    others = {e.step: e for e in fixed if isinstance(e, StepObserved)}
    for step in (e for e in adaptive if isinstance(e, StepObserved)):
        other = others.get(step.step)
        if other is None:
            continue
        loss, fixed_loss = step.metrics["actor/loss"], other.metrics["actor/loss"]
        table.add_row(
            str(step.step),
            f"{step.step_s:.2f}",
            f"{other.step_s:.2f}",
            f"{loss:+.6f}",
            f"{fixed_loss:+.6f}",
            f"{abs(loss - fixed_loss):.1e}",
            f"{step.metrics['reward']:.3f}",
        )
    return table


def main() -> int:
    """Run both, print the comparison, write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny random model instead")
    parser.add_argument("--run-dir", type=Path, help="default: the one of the configuration")
    chosen = parser.parse_args()
    config = HERE / ("quick.toml" if chosen.quick else "nereus.toml")
    run_dir = chosen.run_dir or NereusConfig.load(config).run_dir
    console = Console()

    console.rule("adaptive run")
    adaptive = run(config, run_dir)
    console.rule("the same job under its fixed start-up plan, no device lost")
    fixed_dir = run_dir / "fixed"
    fixed = run(config, fixed_dir, "--mode", "observe", "--set", "backend.events=[]")

    console.print(comparison(adaptive, fixed))
    done = [e for e in adaptive if isinstance(e, TransitionFinished) and e.outcome == "done"]
    kinds = sorted({e.kind for e in adaptive if isinstance(e, PrimitiveFinished)})
    decided = [e for e in adaptive if isinstance(e, Decided)]
    console.print(
        f"{len(decided)} decisions, {len(done)} transitions done "
        f"({', '.join(kinds)}), {sum(e.elapsed_s for e in done):.2f} s in transitions"
    )
    report = run_dir / "report.html"
    write_report(run_dir / "events.jsonl", report, baseline=fixed_dir / "events.jsonl")
    console.print(f"report: {report}   traces: {run_dir / 'traces'} (open in Perfetto)")
    return 0 if done else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""banner: the one line that says Nereus is on, and the warning that says why it is not.

Both go to standard error and not to a logger: frameworks configure and hide loggers, and a flag
that did nothing without a word is worse than one that failed.
"""

from __future__ import annotations

import sys

from nereus_core.config import NereusConfig
from nereus_core.plan import Plan

_WILL = {
    "observe": "records only",
    "advise": "says what it would do, changes nothing",
    "adapt": "changes the job when that pays",
}


def banner(config: NereusConfig, framework: str, plan: Plan) -> str:
    """Write what is on, in which mode, on what plan, and where to read about it."""
    mode = config.mode if config.enabled else "observe"
    return (
        f"[nereus] on: {framework}, mode {mode} ({_WILL[mode]}); {plan}; "
        f"events in {config.run_dir / 'events.jsonl'}"
    )


def refusal(framework: str, error: BaseException) -> str:
    """Write why Nereus does not act on this job, and what to do."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return (
        f"[nereus] WARNING: OFF for this {framework} job, which goes on without it. {reason} "
        f"(`nereus doctor {framework}` checks the installation.)"
    )


def say(line: str) -> None:
    """Print a line to standard error at once."""
    print(line, file=sys.stderr, flush=True)

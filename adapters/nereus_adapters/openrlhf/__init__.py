"""OpenRLHF: adapts a running `train_ppo_ray` job from inside its trainer actor.

Importing this package imports neither OpenRLHF nor Ray; the hooks do when they are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nereus_adapters.openrlhf.seams import SEAMS
from nereus_adapters.openrlhf.seams_below import SEAMS_BELOW
from nereus_core.capabilities import Capabilities, Feature, Support, full, unsupported
from nereus_core.declaration import AdapterDeclaration, KnownFailure
from nereus_core.errors import WrongHandle
from nereus_core.hookspecs import hookimpl
from nereus_core.workload import Stage

if TYPE_CHECKING:
    from nereus_adapters.openrlhf.adapter import OpenRLHFAdapter
    from nereus_adapters.openrlhf.harness import OpenRLHFHarness
    from nereus_core.config import NereusConfig

NAME = "openrlhf"

_EVERY_STAGE: dict[Stage, Support] = {stage: full() for stage in Stage}
CAPABILITIES = Capabilities(
    split=_EVERY_STAGE,
    merge=_EVERY_STAGE,
    extend=_EVERY_STAGE,
    destroy=_EVERY_STAGE,
    features={
        Feature.OPTIMIZER_STATE: full(),
        Feature.RNG_STATE: unsupported(
            "OpenRLHF seeds every rank alike and shuffles its replay buffer with that generator, "
            "so that another number of ranks draws another order"
        ),
        Feature.DATALOADER_STATE: full(),
        Feature.FINGERPRINT: full(),
        Feature.CONCURRENT_PRIMITIVES: full(),
        Feature.COLOCATED_STAGES: full(),
        Feature.ASYNC_BOUNDARY: unsupported(
            "asynchronous jobs are changed too, but OpenRLHF holds the lock of its engines for a "
            "whole rollout: a boundary that holds them or the actor opens when the rollout ends"
        ),
        Feature.PIPELINE_STAGES: unsupported("OpenRLHF has no pipeline parallelism"),
        Feature.PARTIAL_ROLLOUT: unsupported("requests are drained before engines change"),
        Feature.UNIT_LOSS: unsupported(
            "ZeRO keeps each part of the optimizer state on one rank, so a lost rank is lost state"
        ),
        Feature.MEMORY_PROBE: unsupported("ranks are asked for peaks on CUDA only"),
        Feature.EFFICIENCY_PROBE: unsupported("stage seconds are measured, classes are not"),
    },
)


KNOWN_FAILURES: dict[str, str | KnownFailure] = {
    "test_merge_of_diverged_units_is_refused": (
        "ZeRO keeps each part of a moment once in a stage, so that units cannot differ in it"
    ),
    "test_split_that_exceeds_memory_is_infeasible_before_it_starts": (
        "the adapter compares no primitive with a device's memory: that is the planner's business; "
        "and under ZeRO two children share their moments, and fit in what this case leaves them"
    ),
    "test_moved_bytes_equal_the_planned_routes": (
        "a group's state goes through host memory: all of it moves, whatever stays where it was"
    ),
    "test_extended_rollout_serves_the_source_version": KnownFailure(
        "a training unit is seen by its fp32 masters, an engine by the bfloat16 that it was given; "
        "what serves which version is told by the actor's bfloat16 weights, and holds",
        says=r"I11 version: .* has other weights than training",
    ),
    "test_extend_picks_the_nearest_source": (
        "engines get their weights by OpenRLHF's broadcast when the job is linked, whole"
    ),
    "test_fingerprint_depends_on_state_alone": (
        "digests are of fp32 masters, which engines and the reference have not"
    ),
}
"""Cases that OpenRLHF makes untrue, by name; all of them run and must fail."""


@hookimpl
def nereus_declare_adapter() -> AdapterDeclaration:
    """Declare the adapter without importing OpenRLHF."""
    return AdapterDeclaration(
        NAME,
        "OpenRLHF's train_ppo_ray, synchronous and asynchronous, on ZeRO and AutoTP",
        CAPABILITIES,
        requirement="openrlhf>=0.11,<0.12",
        install="pip install 'nereus[openrlhf]'",
        seams=(*SEAMS, *SEAMS_BELOW),
        tiers=("real",),
        known_failures=KNOWN_FAILURES,
    )


@hookimpl
def nereus_create_adapter(
    name: str, handle: object, config: NereusConfig
) -> OpenRLHFAdapter | None:
    """Attach to a trainer, in the process of its actor."""
    if name != NAME:
        return None
    # Told by name: a trainer's process has imported the class, others need not.
    if "BasePPOTrainer" not in [base.__name__ for base in type(handle).__mro__]:
        raise WrongHandle(NAME, handle, "openrlhf's PPOTrainer or TrainingActor")
    from nereus_adapters.openrlhf.attaching import attach

    return attach(handle, config)


@hookimpl(optionalhook=True)
def nereus_conformance_harness(
    name: str, tier: str, options: Mapping[str, str]
) -> OpenRLHFHarness | None:
    """Return the harness of the real tier: OpenRLHF on a CPU. It has no options."""
    if name != NAME or tier != "real":
        return None
    from nereus_adapters.openrlhf.harness import OpenRLHFHarness

    return OpenRLHFHarness(**options)

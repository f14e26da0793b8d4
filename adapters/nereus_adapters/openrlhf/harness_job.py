"""What a job of the conformance harness is made of: OpenRLHF's trainer, and units of a plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nereus_core.plan import Plan
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ACTOR_TRAIN, CRITIC_TRAIN, REF_INFER, ModelStage


@contextmanager
def quiet() -> Iterator[None]:
    """Let frameworks warn of what they will: a test run may make errors of warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def units_of(plan: Plan) -> Iterator[Unit]:
    """Yield the units of a plan, numbered from 0 in each stage."""
    for stage, placement in plan.items():
        for number, devices in enumerate(placement.units):
            yield Unit(UnitId(stage, number), placement.layout, devices)


def trainer_over(args: Any, stages: list[ModelStage]) -> Any:
    """Build OpenRLHF's trainer over groups without ranks, and no engine."""
    from openrlhf.trainer.ppo_trainer import PPOTrainer
    from openrlhf.trainer.ray.launcher import RayActorGroup, ReferenceModelActor
    from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
    from openrlhf.trainer.ray.ppo_critic import CriticModelActor
    from openrlhf.utils.utils import get_strategy
    from transformers import set_seed

    kinds = {
        ACTOR_TRAIN: PolicyModelActor,
        CRITIC_TRAIN: CriticModelActor,
        REF_INFER: ReferenceModelActor,
    }

    def group(stage: ModelStage) -> Any:
        if stage not in stages:
            return None
        made = RayActorGroup.__new__(RayActorGroup)  # `groups.seat` gives it the ranks of the plan
        made.ray_actor_type, made._actor_handlers, made.duplicate_actors = kinds[stage], [], 1
        return made

    set_seed(args.train.seed)
    kind: Callable[..., Any] = PPOTrainer.__ray_metadata__.modified_class
    made = kind(
        args.actor.model_name_or_path, get_strategy(args), group(ACTOR_TRAIN),
        group(CRITIC_TRAIN), None, group(REF_INFER), [],
        do_sample=True, max_len=args.data.max_len, max_new_tokens=args.rollout.max_new_tokens,
        temperature=args.rollout.temperature, top_p=args.rollout.top_p,
    )  # fmt: skip
    generator = made.samples_generator
    generator._dataloader_iter, generator._sample_buffer = iter(made.prompts_dataloader), []
    return made

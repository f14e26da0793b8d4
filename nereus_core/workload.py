"""What an RL algorithm runs, in what order: model-stages, their graph, and the job around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, NamedTuple, Self

from nereus_core.cluster import Cluster
from nereus_core.model import ModelSpec


class Stage(StrEnum):
    """What a model does in a model-stage."""

    GENERATE = "generate"
    INFER = "infer"
    TRAIN = "train"

    __hash__ = str.__hash__  # Enum's own is a function in Python, called for every model-stage


class ModelStage(NamedTuple):
    """One model in one stage, written ``actor/train``."""

    model: str
    stage: Stage

    def __str__(self) -> str:
        return f"{self.model}/{self.stage}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read back what ``str`` wrote; raises ValueError on anything else."""
        model, _, stage = text.partition("/")
        if not model or stage not in list(Stage):
            raise ValueError(f"not a model-stage: {text!r}; expected e.g. 'actor/train'")
        return cls(model, Stage(stage))


@dataclass(frozen=True, slots=True)
class Node:
    """A model-stage in the algorithm's graph."""

    model_stage: ModelStage
    after: tuple[ModelStage, ...] = ()
    """Model-stages whose results this one needs within a step."""
    passes: int = 1
    """How often the stage runs per step (ReMax generates twice: sampled, then greedy)."""
    weights_from: ModelStage | None = None
    """The train stage whose weights this one follows; None when its weights are frozen or own."""
    origin: bool = False
    """Whether its weights never change and can be loaded again from where they first came from."""


Algorithm = Literal["ppo", "grpo", "remax"]

ACTOR_GENERATE = ModelStage("actor", Stage.GENERATE)
ACTOR_TRAIN = ModelStage("actor", Stage.TRAIN)
CRITIC_INFER = ModelStage("critic", Stage.INFER)
CRITIC_TRAIN = ModelStage("critic", Stage.TRAIN)
REF_INFER = ModelStage("ref", Stage.INFER)


@dataclass(frozen=True, slots=True)
class Workload:
    """An algorithm as a graph of model-stages, in a topological order that is also stage order."""

    algorithm: Algorithm
    nodes: tuple[Node, ...]
    asynchronous: bool = False
    """Generation of the next batch overlaps training on the last; the boundary is weight sync."""

    @property
    def stages(self) -> tuple[ModelStage, ...]:
        """All model-stages in stage order."""
        return tuple(n.model_stage for n in self.nodes)

    def node(self, model_stage: ModelStage) -> Node:
        """Return the node of a model-stage; raises KeyError naming it when there is none."""
        for node in self.nodes:
            if node.model_stage == model_stage:
                return node
        raise KeyError(f"{model_stage} is not part of {self.algorithm}")

    def followers(self, train: ModelStage) -> tuple[ModelStage, ...]:
        """Model-stages that take their weights from ``train``."""
        return tuple(n.model_stage for n in self.nodes if n.weights_from == train)


def ppo(*, asynchronous: bool = False) -> Workload:
    """PPO with a critic (GAE) and a frozen reference."""
    return Workload(
        "ppo",
        (
            Node(ACTOR_GENERATE, weights_from=ACTOR_TRAIN),
            Node(REF_INFER, (ACTOR_GENERATE,), origin=True),
            Node(CRITIC_INFER, (ACTOR_GENERATE,), weights_from=CRITIC_TRAIN),
            Node(CRITIC_TRAIN, (CRITIC_INFER, REF_INFER)),
            Node(ACTOR_TRAIN, (CRITIC_INFER, REF_INFER)),
        ),
        asynchronous,
    )


def _critic_free(algorithm: Algorithm, passes: int, *, asynchronous: bool) -> Workload:
    return Workload(
        algorithm,
        (
            Node(ACTOR_GENERATE, passes=passes, weights_from=ACTOR_TRAIN),
            Node(REF_INFER, (ACTOR_GENERATE,), origin=True),
            Node(ACTOR_TRAIN, (REF_INFER,)),
        ),
        asynchronous,
    )


def grpo(*, asynchronous: bool = False) -> Workload:
    """GRPO: group-normalised rewards, no critic."""
    return _critic_free("grpo", 1, asynchronous=asynchronous)


def remax(*, asynchronous: bool = False) -> Workload:
    """ReMax: the greedy response's reward is the baseline, so generation runs twice."""
    return _critic_free("remax", 2, asynchronous=asynchronous)


ALGORITHMS = {"ppo": ppo, "grpo": grpo, "remax": remax}


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per parameter of each part of a model's state."""

    compute: Literal["float64", "float32", "bfloat16"]
    param_bytes: int
    grad_bytes: int
    moment_bytes: int
    """Of one Adam moment; there are two."""
    master_bytes: int = 0
    """Of a separate full-precision copy, where the optimizer keeps one."""

    @property
    def train_bytes(self) -> int:
        """Bytes per parameter that a train stage keeps between steps, gradients not counted."""
        return self.param_bytes + 2 * self.moment_bytes + self.master_bytes

    def kept_bytes(self, stage: Stage) -> int:
        """Bytes per parameter that a stage keeps between steps."""
        return self.train_bytes if stage is Stage.TRAIN else self.param_bytes


FLOAT64 = Precision("float64", 8, 8, 8)
FLOAT32 = Precision("float32", 4, 4, 4)
BFLOAT16_MIXED = Precision("bfloat16", 2, 4, 4, 4)
PRECISIONS = {p.compute: p for p in (FLOAT64, FLOAT32, BFLOAT16_MIXED)}


Recompute = Literal["none", "full"]
"""Activations that a backward pass computes again: none, or all but the inputs of layers."""


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Tokens that a micro-batch of a stage may have for each rank that shares its sequences."""

    least: int
    """In the pass that has fewest: a whole sequence has to go into a micro-batch of it."""
    most: int
    """In the pass that has most, for which memory is needed."""


@dataclass(frozen=True, slots=True)
class Job:
    """The static facts of a running job."""

    workload: Workload
    models: Mapping[str, ModelSpec]
    """By the model part of a model-stage: ``actor``, ``critic``, ``ref``."""
    cluster: Cluster
    global_batch: int
    """Sequences (prompts x responses per prompt) in one step; constant for the job's life."""
    max_prompt_tokens: int
    max_response_tokens: int
    precision: Precision = FLOAT32
    micro_batch: int = 1
    """Sequences a unit holds in one forward/backward."""
    num_steps: int | None = None
    """RL steps that the job runs in all, where it has said so: no saving outlives it."""
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    """Tensor-parallel ranks share out the activations that they would all hold otherwise."""
    sharded_optimizer: bool = False
    """Units of a train stage share its optimizer state out among themselves (ZeRO stage 1)."""
    together: tuple[frozenset[ModelStage], ...] = ()
    """Model-stages that live in the same processes: they hold the same devices, all of them."""
    within_node: frozenset[ModelStage] = frozenset()
    """Model-stages none of whose units may lie on several nodes."""
    device_batch: int | None = None
    """Sequences that a framework shares out by device where others do by unit (FSDP): the devices
    of every stage but generation must divide them, and each computes its own with the whole model's
    activations, ``micro_batch`` at a time; None where it does not."""
    row_cut: frozenset[ModelStage] = frozenset()
    """Model-stages whose ranks cut every tensor by rows (FSDP): any number of them may hold a copy,
    whatever heads there are; heads bind them where they share sequences (``sequence_parallel``)."""
    kv_heads_cut: frozenset[ModelStage] = frozenset()
    """Model-stages whose units cut key/value heads and copy none: tp must divide their number."""
    most_stages: Mapping[ModelStage, int] = field(default_factory=dict)
    """Pipeline stages that units of a model-stage may have; as many as layers where it is not
    named."""
    logits_whole: frozenset[ModelStage] = frozenset()
    """Model-stages each of whose devices holds its unit's logits whole, whatever tp is: they are
    gathered for the loss."""
    sequence_ranks: Mapping[ModelStage, int] = field(default_factory=dict)
    """Devices that share each sequence of a stage under ``device_batch``, whatever its layout
    (Ulysses sequence parallelism); 1 where a stage is not named."""
    unit_batch: int | None = None
    """Sequences that the units of every stage but generation must divide, beside ``global_batch``:
    parts of a batch that have to fill whole micro-batches; None where none do."""
    micro_tokens: Mapping[ModelStage, TokenBudget] = field(default_factory=dict)
    """By stage, where a framework cuts micro-batches by tokens; ``micro_batch`` sequences where a
    stage is not named."""

    def model(self, model_stage: ModelStage) -> ModelSpec:
        """Return the shapes of the model that a stage runs."""
        return self.models[model_stage.model]

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence that there may be."""
        return self.max_prompt_tokens + self.max_response_tokens

    def share_problem(self, stage: ModelStage, num_devices: int, units: int) -> str | None:
        """Say why a batch cannot be shared out among the devices of a stage, or return None."""
        if stage.stage is Stage.GENERATE:
            return None
        if self.unit_batch is not None and self.unit_batch % units:
            return f"{units} units do not divide {self.unit_batch} sequences"
        budget, longest = self.micro_tokens.get(stage), self.longest_tokens
        if budget is not None and self.sequence_parallel:
            ranks = num_devices // units
            if budget.least * ranks < longest:
                held = f"a micro-batch of {budget.least} tokens on each of {ranks} ranks"
                return f"{held} does not take a sequence of {longest}"
        if self.device_batch is None:
            return None
        if num_devices % (ranks := self.sequence_ranks.get(stage, 1)):
            return f"{ranks} ranks that share each sequence do not divide {num_devices} devices"
        if self.device_batch % num_devices:
            return f"{num_devices} devices do not divide {self.device_batch} sequences"
        return None

    def on(self, cluster: Cluster) -> Self:
        """Return the same job on another state of its cluster."""
        return replace(self, cluster=cluster)

"""checkpoints: which of OpenRLHF's checkpoints a job can go on from, and with what flags.

A checkpoint is whole when OpenRLHF's call that saves it has returned: actor and critic are there. A
file `latest` may name one that is not, for it is written before all ranks have saved. DeepSpeed
loads it on as many ranks as saved it, so that after a change other flags are needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SAME = "the same command and"
_LOAD = "--ckpt.load_enable"
_CONVERTED = (
    f"{_SAME} {_LOAD} --ds.use_universal_ckpt, when `python -m "
    "deepspeed.checkpoint.ds_to_universal` has converted it: actor and critic had different degrees"
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is whole."""

    folder: Path
    """Of the actor's part, absolute."""
    step: int
    resume: str
    """How to go on from it."""

    def __str__(self) -> str:
        unseen = "" if self.folder.parent.is_dir() else " (on the node of the actor's first rank)"
        return f"{self.folder}{unseen}"


class Checkpoints:
    """What a job has saved; made before its first step.

    Args:
        trainer: OpenRLHF's trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._args = trainer, trainer.args
        self._began = self._layout()
        self._kept: list[Checkpoint] = []
        if self._args.ckpt.load_enable:
            self._take_loaded()

    def due(self, step: int) -> bool:
        """Whether OpenRLHF saves a checkpoint after a step."""
        every = self._args.ckpt.save_steps
        return not self._args.ckpt.disable_ds and every > 0 and step % every == 0

    def saved(self, step: int) -> None:
        """Take in that the checkpoint of a step is whole."""
        if self.due(step):
            folder = self._folder / f"global_step{step}"
            self._kept.append(Checkpoint(folder, step, self._resume()))

    @property
    def newest(self) -> Checkpoint | None:
        """The newest that is whole and, as far as can be seen from here, has not been removed."""
        for kept in reversed(self._kept):
            if kept.folder.is_dir() or not kept.folder.parent.is_dir():
                return kept
        return None

    @property
    def why_none(self) -> str:
        """What to do for there to be one."""
        if self._args.ckpt.disable_ds:
            return "no checkpoint was kept: leave --ckpt.disable_ds out"
        every = self._args.ckpt.save_steps
        if every <= 0 or every == float("inf"):
            return "no checkpoint was kept: set --ckpt.save_steps"
        return f"no checkpoint was kept in {self._folder} yet: one is due every {every} steps"

    @property
    def _folder(self) -> Path:
        return Path(self._args.ckpt.path).absolute() / "_actor"

    def _take_loaded(self) -> None:
        try:
            tag = (self._folder / "latest").read_text(encoding="utf-8").strip()
        except OSError:
            return
        if number := re.search(r"(\d+)$", tag):
            self._kept.append(Checkpoint(self._folder / tag, int(number[1]), f"{_SAME} {_LOAD}"))

    def _resume(self) -> str:
        critic = getattr(self._trainer, "critic_model_group", None)
        if critic is not None and critic.duplicate_actors != self._args.ds.tensor_parallel_size:
            return _CONVERTED
        now = self._layout()
        changed = [f"--{flag} {value}" for flag, value in now.items() if value != self._began[flag]]
        return " ".join([_SAME, *changed, _LOAD])

    def _layout(self) -> dict[str, int]:
        """Flags that say how many ranks a job has; the adapter keeps the trainer's as they are."""
        args, train = self._args, self._args.train
        sized = {"actor": args.actor, "critic": args.critic}
        if train.colocate_actor_ref or train.colocate_all:
            sized["ref"] = args.actor  # OpenRLHF wants them alike
        if train.colocate_critic_reward:
            sized["reward"] = args.critic
        found = {}
        for name, group in sized.items():
            found[f"{name}.num_nodes"] = group.num_nodes
            found[f"{name}.num_gpus_per_node"] = group.num_gpus_per_node
        found["ds.tensor_parallel_size"] = args.ds.tensor_parallel_size
        if train.colocate_all:
            found["vllm.num_engines"] = args.vllm.num_engines
            found["vllm.tensor_parallel_size"] = args.vllm.tensor_parallel_size
        return found

"""What verl's conformance jobs stand on where there is no accelerator: ``--harness stand=...``.

Importing it sets the environment that verl reads as it is imported.
"""

import os
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import ray

from verl_cpu.asked import begun, forget, hold, release, turns_away, version, weights
from verl_cpu.assets import make_assets
from verl_cpu.command import environment, overrides
from verl_cpu.stem import warm

_FOLDER = tempfile.TemporaryDirectory(prefix="nereus-verl-stand-")
os.environ.update(environment(Path(_FOLDER.name)))
os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray refuses logical GPUs where it names none

GONE_S = 30
"""Until Ray has forgotten the names of servers that were killed. Chosen, not measured."""
_PREFIX = "hf_cpu_"


def stand():
    """Return a stand; one for a run."""
    return Stand()


class Stand:
    """Implements `nereus_adapters.verl.harness.Stand`."""

    def __init__(self):
        self._folder = Path(_FOLDER.name)
        self._open = ExitStack()
        self._open.callback(_FOLDER.cleanup)
        assets = make_assets(self._folder / "assets", hidden=32, layers=4)
        self.model = assets / "model"
        self._assets = assets
        self._stem = self._open.enter_context(warm(self._folder, dict(os.environ)))

    def arguments(self, algorithm):
        shape = {"critic": algorithm == "ppo", "reference": True, "response": 8, "micro": 2}
        return [
            *overrides(self._assets, self._folder, steps=1000, **shape),
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            *(["critic.ppo_mini_batch_size=4"] if algorithm == "ppo" else []),
            "actor_rollout_ref.rollout.n=2",
            # With one mini-batch a step, the policy's loss alone is 0 but for rounding.
            "actor_rollout_ref.actor.entropy_coeff=0.01",
            "trainer.logger=[]",
            f"+ray_kwargs.ray_init.runtime_env.py_executable='{self._stem}'",
            "+ray_kwargs.ray_init.log_to_driver=False",
        ]

    def weights(self, server):
        return ray.get(server.__ray_call__.remote(weights), timeout=GONE_S)

    def version(self, server):
        return int(ray.get(server.__ray_call__.remote(version), timeout=GONE_S) or 0)

    @contextmanager
    def hold(self, servers):
        def all_of(function):
            return ray.get([s.__ray_call__.remote(function) for s in servers], timeout=GONE_S)

        all_of(hold)
        try:
            yield lambda: sum(all_of(begun))
        finally:
            all_of(release)

    def again(self):
        with suppress(ValueError):  # no server yet
            turns = ray.get_actor("hf_cpu_turns", namespace="verl_cpu")
            ray.get(turns.__ray_call__.remote(forget), timeout=GONE_S)

    def ended(self):
        with suppress(ValueError):
            ray.kill(ray.get_actor("hf_cpu_turns", namespace="verl_cpu"))
        for name, namespace in _servers():
            with suppress(ValueError, ray.exceptions.RayActorError):  # on its way out
                server = ray.get_actor(name, namespace=namespace)
                # One that left an asynchronous job, and would go on with this for a minute.
                if ray.get(server.__ray_call__.remote(turns_away), timeout=GONE_S):
                    ray.kill(server)
        deadline = time.monotonic() + GONE_S
        while servers := _servers():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {GONE_S} s for {servers} to be gone")
            time.sleep(0.02)

    def close(self):
        self._open.close()


def _servers():
    found = ray.util.list_named_actors(all_namespaces=True)
    return [(a["name"], a["namespace"]) for a in found if a["name"].startswith(_PREFIX)]

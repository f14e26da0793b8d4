"""Servers with verl's gate and none of its engines, for what becomes of replicas that leave.

`Replica` and what it needs live in the test's own process; `Server` is an actor, for ends that
are real.
"""

import asyncio
from types import SimpleNamespace

import ray

LIMIT_S = 120


class Engine:
    def __init__(self, fault):
        self._fault = fault

    def shutdown(self):
        if self._fault == "shutdown-raises":
            raise RuntimeError("this engine does not end")


@ray.remote(num_cpus=0)
class Server:
    """A process with an engine, as the end of a replica finds it."""

    def __init__(self, fault=""):
        self.engine = Engine(fault)

    async def answer(self):
        return "aborted"

    async def until_it_ends(self):
        await asyncio.Event().wait()


class Shrinking:
    """Requests under way, one less each time that somebody counts them."""

    def __init__(self, left):
        self.left = left

    def __len__(self):
        now, self.left = self.left, max(0, self.left - 1)
        return now


class Gate:
    """A server's: open, closed, or turning requests away."""

    def __init__(self):
        self.state, self._resume_event = "open", SimpleNamespace(_waiters=())
        self.under_way = Shrinking(3)
        front = SimpleNamespace(request_states=self.under_way)
        self.engine = SimpleNamespace(output_processor=front)
        self.__ray_call__ = SimpleNamespace(
            remote=lambda function, *args: ray.put(function(self, *args))
        )

    @property
    def _rejecting(self):
        return self.state == "turning"


class Replica:
    """One of verl's, with a server in this process."""

    def __init__(self, rank, fault="", beside=None):
        self.replica_rank, self._server_address, self._fault = rank, f"server{rank}", fault
        self.gate = self._server_handle = Gate()
        self.servers = [self.gate]
        self.workers = [SimpleNamespace(_actor_id=f"worker{rank if beside is None else beside}")]
        self.config = SimpleNamespace(tensor_model_parallel_size=1)

    async def abort_all_requests(self, reject_request=False):
        if self._fault == "hangs":
            await asyncio.Event().wait()
        if self._fault == "raises":
            raise RuntimeError("this engine has failed")
        self.gate.state = "turning" if reject_request else "closed"


class Balancer:
    """Knows servers by name; refuses to forget any, once, if asked to."""

    def __init__(self, servers):
        self.names, self.refuses = set(servers), False
        self.add_servers = SimpleNamespace(remote=lambda new: ray.put(self.names.update(new)))
        self.remove_servers = SimpleNamespace(remote=self._remove)
        self.get_all_servers = SimpleNamespace(remote=lambda: ray.put(dict.fromkeys(self.names)))

    def _remove(self, names):
        if self.refuses:
            self.refuses = False
            raise RuntimeError("this balancer does not let go")
        return ray.put(self.names.difference_update(names))


class Weights:
    """verl's synchronizations: all replicas are closed first, and opened as the last act."""

    def __init__(self, *faults):
        self.replicas, self.asked, self._faults = [], [], list(faults)

    def update_weights(self, version):
        self.asked.append(version)
        for replica in self.replicas:
            replica.gate.state = "closed"
        if self._faults:
            self._faults.pop(0)()
        for replica in self.replicas:
            replica.gate.state = "open"


def trainer(replicas, mode, weights=None):
    """Return what the adapter reads of verl's trainer, by whichever names a mode has."""
    balancer = Balancer(replica._server_address for replica in replicas)
    manager = SimpleNamespace(rollout_replicas=list(replicas), global_load_balancer=balancer)
    return SimpleNamespace(
        trainer_mode=mode,
        global_steps=6,
        llm_server_manager=manager,
        checkpoint_manager=weights or Weights(),
        standalone_server_manager=manager,
        standalone_checkpoint_manager=weights,
    )

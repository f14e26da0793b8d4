"""ActorChannel: the driver's end of one seat that is a Ray actor."""

from __future__ import annotations

import contextlib
import pickle
import threading
from concurrent.futures import Future, wait
from typing import Any

import ray

from nereus_adapters.torch.channel import Answer, Pending
from nereus_adapters.torch.wire import Call, Reply
from nereus_core.cluster import Device
from nereus_core.errors import SeatDead


class ActorChannel:
    """Calls to one actor, run there in the order in which they were sent.

    The actor's `watch` stands open as long as it lives, so its death is noticed with no call under
    way: at once when the process ends, in about 2 s when its node is lost. An actor that Ray calls
    unavailable counts as dead: nothing can be said of its state.
    """

    def __init__(self, device: Device, node_id: str, actor: Any) -> None:
        self.device, self.node_id = device, node_id
        self._actor = actor  # Any: Ray makes handles at run time
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[str, Future[Answer]]] = {}
        self._next_id = 0
        self._gone = threading.Event()
        watched = _future(actor.watch.options(concurrency_group="watch").remote())
        watched.add_done_callback(self._ended)

    @property
    def alive(self) -> bool:
        """Whether the seat still answers."""
        return not self._gone.is_set()

    def call(self, method: str, **kwargs: object) -> Pending:
        """Send a call; a dead seat fails it at once."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._gone.is_set():
                future.set_exception(SeatDead(self.device, None, method))
                return Pending(self.device, method, future)
            number = self._next_id
            self._next_id += 1
            self._pending[number] = (method, future)
            frame = pickle.dumps(Call(number, method, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
            replied = _future(self._actor.run.remote(frame))
        replied.add_done_callback(lambda done: self._settle(number, done))
        return Pending(self.device, method, future)

    def kill(self) -> None:
        """End the process at once; it is not started again."""
        ray.kill(self._actor, no_restart=True)

    def join(self, timeout_s: float) -> None:
        """Wait until the end of the actor has been noticed."""
        self._gone.wait(timeout_s)

    def say_goodbye(self) -> None:
        """Let the actor's watch end, after the calls it has."""
        with contextlib.suppress(ray.exceptions.RayError):
            self._actor.end.remote()

    def close(self, timeout_s: float) -> None:
        """Let the calls under way finish, then end the process."""
        self.say_goodbye()
        with self._lock:
            under_way = [future for _, future in self._pending.values()]
        wait(under_way, timeout_s)
        self.kill()
        self._bury()

    def _settle(self, number: int, done: Future[Any]) -> None:
        """Hand a reply to whoever waits for it."""
        if isinstance(done.exception(), ray.exceptions.RayActorError):
            self._give_up()
            return
        with self._lock:
            method, future = self._pending.pop(number, (None, None))
        if future is None or method is None:  # buried a moment ago
            return
        if (error := done.exception()) is not None:
            future.set_exception(error)
            return
        reply: Reply = pickle.loads(done.result())
        if reply.failure is None:
            future.set_result(Answer(reply.value, reply.elapsed_s))
        else:
            future.set_exception(reply.failure.rebuilt(self.device, method))

    def _ended(self, watched: Future[None]) -> None:
        """Take note that the actor has ended: as told, or not."""
        if watched.exception() is None:
            self._gone.set()
        else:
            self._give_up()

    def _give_up(self) -> None:
        """End an actor of which nothing can be said: it must not come back half alive."""
        self._bury()
        # Callbacks run on Ray's own thread, which must not wait for Ray.
        threading.Thread(target=self.kill, name=f"end {self.device}", daemon=True).start()

    def _bury(self) -> None:
        with self._lock:
            self._gone.set()
            left, self._pending = self._pending, {}
        for method, future in left.values():
            future.set_exception(SeatDead(self.device, None, method))


def _future(ref: Any) -> Future[Any]:
    found: Future[Any] = ref.future()
    return found

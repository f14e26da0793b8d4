"""A response that reaches the ranks after they were told to end all: it is ended all the same."""

import asyncio
import multiprocessing
import types

import pytest

pytestmark = pytest.mark.real

WAIT_S = 30.0


class Ranks:
    """An SGLang engine whose ranks hear of a request when the test says so."""

    def __init__(self):
        self.known, self.reached, self.asked = {}, asyncio.Event(), 0
        self.tokenizer_manager = types.SimpleNamespace(abort_request=self.abort)
        self.told = asyncio.Event()

    def abort(self, *, abort_all):
        """End what the ranks know; SGLang says nothing of the others."""
        assert abort_all
        self.asked += 1
        self.told.set()
        for ended in self.known.values():
            ended.set()

    async def async_generate(self, *, rid, **_):
        return self._parts(rid)

    async def _parts(self, rid):
        await self.reached.wait()
        ended = self.known[rid] = asyncio.Event()
        meta = {"output_token_logprobs": [(-0.5, 7, None)], "finish_reason": None}
        yield {"output_ids": [7], "meta_info": meta}
        await ended.wait()
        del self.known[rid]
        yield {"output_ids": [7], "meta_info": {**meta, "finish_reason": {"type": "abort"}}}


class Meter:
    """Counts nothing."""

    def __getattr__(self, name):
        return lambda *_: None


@pytest.fixture
def connection():
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.filterwarnings("ignore")  # of what sglang imports
def test_what_reaches_the_ranks_after_the_first_word_is_ended_by_another(connection):
    from nereus_adapters.rollout.sglang.host import Host

    ours, theirs = connection

    async def race():
        ranks = Ranks()
        host = Host.__new__(Host)
        host._engine, host._connection, host._meter = ranks, theirs, Meter()
        host._manager, host._running, host._tasks = ranks.tokenizer_manager, {}, set()
        host._methods = {"interrupt": host.interrupt}
        sampling = {"max_new_tokens": 8}
        host._take(-1, "submit", {"prompt_id": "p", "tokens": [1], "sampling": sampling})
        host._take(1, "interrupt", {"timeout_s": WAIT_S})
        await ranks.told.wait()  # the ranks were told, and knew of nothing
        assert not ranks.known
        ranks.reached.set()
        await asyncio.gather(*host._tasks)
        assert ranks.asked > 1
        assert not host._running

    asyncio.run(asyncio.wait_for(race(), WAIT_S))
    said = [ours.recv() for _ in range(3)]
    assert said == [("tokens", "p", [7], [-0.5]), ("done", "p", "abort"), ("answer", 1, None)]

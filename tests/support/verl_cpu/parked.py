"""A request that waits at the closed gate of verl's own vLLM server, as the adapter lets it go.

Run as ``python -m verl_cpu.parked`` in the environment of a job; prints what became of it.
"""

import asyncio
import json

from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from nereus_adapters.verl.inside_server import let_go

LIMIT_S = 30


async def main():
    server = object.__new__(vLLMHttpServer)  # its gate alone; an engine is not needed for that
    server._submission_paused, server._rejecting, server._admitting = True, False, 0
    server._resume_event, server.global_steps = asyncio.Event(), 3
    parked = asyncio.create_task(server._park_until_admitted("parked"))
    await asyncio.sleep(0)
    found = {"open": await asyncio.to_thread(let_go, server), "waits": not parked.done()}
    server._rejecting = True  # as abort_all_requests(reject_request=True) leaves it
    await asyncio.sleep(0)
    found["forgotten"] = not parked.done()
    found["closed"] = await asyncio.to_thread(let_go, server)
    found["parked"] = (await asyncio.wait_for(parked, LIMIT_S)).stop_reason
    found["later"] = (await server._park_until_admitted("later")).stop_reason
    print(json.dumps(found))


asyncio.run(main())

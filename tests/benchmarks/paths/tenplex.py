"""Tenplex: a partitioned checkpoint in memory, re-sliced over HTTP.

What is reproduced: the state transformer (Wagenländer et al., SOSP 2024, sections 4-5): state
leaves the job as a parallelizable tensor collection in each worker's tensor store (an in-memory
file system); on a change each worker fetches the parts of its new sub-collection from the stores
that have them, over HTTP, tensor by tensor, into its own store; the job then loads it from there.
Only missing tensors are fetched. The restart of the job's processes, which Tenplex also pays, is
left out.
"""

from __future__ import annotations

import threading
from functools import partial
from http.client import HTTPConnection
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import torch
from paths.role import Role

PIECE = 1 << 20


class _Store(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or headers wait 40 ms for an acknowledgment

    def log_message(self, *_: object) -> None:
        """Stay quiet."""


def path(role: Role) -> None:
    """Save to the own store, fetch from others', load."""
    store = role.memory / str(role.rank)
    store.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Store, directory=str(store)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ports = torch.zeros(role.group.size, dtype=torch.int64)
    ports[role.rank] = server.server_address[1]
    role.group.all_reduce(ports)

    def save() -> None:
        for key, tensor in role.state.items():
            if role.owner(key) == role.rank or role.rank in role.needers[key]:
                (store / _file(key)).write_bytes(tensor.numpy().data)

    def transform() -> None:
        links: dict[int, HTTPConnection] = {}
        for key in role.needed:
            if key in role.state:
                continue
            owner = role.owner(key)
            link = links.setdefault(owner, HTTPConnection("127.0.0.1", int(ports[owner])))
            link.request("GET", f"/{_file(key)}")
            answer = link.getresponse()
            with (store / _file(key)).open("wb") as out:
                while piece := answer.read(PIECE):
                    out.write(piece)
                    role.moved_bytes += len(piece)
        for link in links.values():
            link.close()

    def load() -> None:
        state = {}
        for key in role.needed:
            state[key] = role.new(key)
            with (store / _file(key)).open("rb") as source:
                source.readinto(state[key].view(-1).view(torch.uint8).numpy().data)
        role.state = state

    role.timed("save", save)
    role.timed("transform", transform)
    role.timed("load", load)
    server.shutdown()
    server.server_close()


def _file(key: str) -> str:
    return key.replace("/", "-")

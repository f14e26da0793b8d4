"""Proof: the members of a new group show one another that they belong to the job.

Gloo asks nobody who connects to it for a name. So before a group is used, every two members answer
each other's challenge with the job's secret; whoever has come in a member's place cannot, and the
group is given up. Connections stand from then on, and nobody else can write to them.
"""

from __future__ import annotations

import hmac
import secrets

import torch

from nereus_adapters.torch.engine.group import Group, PeerLost

_NONCE_BYTES = 32


def prove(group: Group, secret: bytes) -> None:
    """Prove to all other members that this one knows the secret, and let them prove it.

    Raises:
        PeerLost: a member has not; names it. The group is closed.
        WaitTimeout: a member did not answer.
    """
    others = [rank for rank in range(group.size) if rank != group.rank]
    ours = secrets.token_bytes(_NONCE_BYTES)
    theirs = _exchanged(group, dict.fromkeys(others, ours))
    proofs = {rank: _proof(secret, group, group.rank, rank, ours, theirs[rank]) for rank in others}
    for rank, proof in _exchanged(group, proofs).items():
        wanted = _proof(secret, group, rank, group.rank, theirs[rank], ours)
        if not hmac.compare_digest(proof, wanted):
            group.close()
            raise PeerLost(group.name, "meeting", f"rank {rank} does not know the job's secret")


def _proof(
    secret: bytes, group: Group, prover: int, judge: int, mine: bytes, challenge: bytes
) -> bytes:
    what = f"{group.name}\0{group.size}\0{prover}\0{judge}\0".encode() + mine + challenge
    return hmac.digest(secret, what, "sha256")


def _exchanged(group: Group, messages: dict[int, bytes]) -> dict[int, bytes]:
    """Send each other member its message of 32 bytes, and return theirs."""
    arriving = {rank: torch.empty(_NONCE_BYTES, dtype=torch.uint8) for rank in messages}
    leaving = {
        rank: torch.frombuffer(bytearray(text), dtype=torch.uint8)
        for rank, text in messages.items()
    }
    waits = [group.irecv(into, rank) for rank, into in arriving.items()]
    waits += [group.isend(what, rank) for rank, what in leaving.items()]
    for wait in waits:
        wait()
    return {rank: into.numpy().tobytes() for rank, into in arriving.items()}

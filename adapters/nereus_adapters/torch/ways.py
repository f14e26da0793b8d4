"""Ways: the driver decides for every pair of seats how state crosses between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from nereus_adapters.torch.crossing import Digests
from nereus_adapters.torch.values import Arrival, Bucket, Meeting, Offer, Ways
from nereus_core.cluster import Device


def ways(
    offers: Mapping[Device, Offer],
    numbering: Mapping[Device, int],
    messages: Iterable[Bucket],
    name: str,
    timeout_s: float,
    *,
    may_read: bool,
) -> dict[Device, Ways]:
    """Let a seat read from neighbors on its host; all meet in a group when any pair cannot.

    Args:
        offers: of every seat that takes part.
        numbering: ranks of the seats between which something crosses.
        messages: what crosses.
        name: of the group, new on the store.
        timeout_s: of the group.
        may_read: False sends everything through the group.
    """
    by_rank = {rank: offers[device] for device, rank in numbering.items()}
    pairs = {(m.source, m.target) for m in messages}
    near = {(s, t) for s, t in pairs if may_read and _same_host(by_rank[s], by_rank[t])}
    meets = near != pairs
    on_host = Counter(_host(by_rank[target]) for target in {target for _, target in near})

    def of(device: Device) -> Ways:
        rank = numbering.get(device)
        if rank is None:
            return Ways({}, frozenset(), None)
        arrivals = {}
        for source, target in near:
            window = by_rank[source].window
            if target == rank and window is not None:
                arrivals[source] = Arrival(window, by_rank[source].spots[rank])
        readers = frozenset(target for source, target in near if source == rank)
        meeting = Meeting(name, rank, len(numbering), timeout_s) if meets else None
        return Ways(arrivals, readers, meeting, max(1, on_host[_host(by_rank[rank])]))

    return {device: of(device) for device in offers}


def _host(offer: Offer) -> str | None:
    return None if offer.window is None else offer.window.host


def _same_host(one: Offer, other: Offer) -> bool:
    return _host(one) is not None and _host(one) == _host(other)


def turned(
    left: Mapping[Device, Digests], numbering: Mapping[Device, int]
) -> dict[Device, dict[int, tuple[int, ...]]]:
    """From digests per source to digests per target: what each may expect from whom."""
    return {
        device: {
            numbering[source]: found[rank]
            for source, found in left.items()
            if source in numbering and rank in found
        }
        for device, rank in numbering.items()
    }

"""Reads what `verl_cpu.answers` wrote, and holds it to what must be true of it."""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

import torch

from verl_cpu.ulps import ulps

FAR = 1000.0
"""Units in the last place, that weights of another version are apart. Seen: 300000 at least."""


@dataclass
class Request:
    """One request to verl's client."""

    prompt: list[int]
    step: int
    """The last that had ended when it was asked."""
    own: bool
    """Whether the test asked it, and no agent loop."""
    names: list[str] = field(default_factory=list)
    """One for each time that it was asked; once is right."""
    got: list[dict] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    pieces: list[dict] = field(default_factory=list)
    """What servers answered of it, in order: a second apart at least, which verl's client waits
    before it asks again, so that clocks of several processes on one machine can tell."""
    late: bool = False
    """Whether it was held back until its server had gone."""

    @property
    def told(self) -> list[dict]:
        """The pieces that hold any token."""
        return [piece for piece in self.pieces if piece["tokens"]]


def read(work: Path) -> dict[str, Request]:
    """Return the requests of a job by name."""
    lines = [
        json.loads(line)
        for path in work.glob("answers-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    lines.sort(key=lambda line: line["time"])
    found: dict[str, Request] = {}
    for line in lines:
        name, kind = line["request"], line["kind"]
        if kind == "asked":
            request = found.setdefault(name, Request(line["prompt"], line["step"], line["own"]))
            request.names.append(line["name"])
        elif kind == "got":
            found[name].got.append(line)
        elif kind == "piece":
            found[name].pieces.append(line)
        elif kind == "failed":
            found[name].failed.append(line["error"])
        else:
            found[name].late = True
    return found


def require_none_lost(requests: dict[str, Request], asked: int, since: int) -> None:
    """Hold that each was asked once and answered, by its pieces one after the other.

    One that is asked anew has a second name, and one that two servers answer has pieces that do not
    follow each other.

    Args:
        requests: As `read` returns them.
        asked: How many the job asks if it has to ask none anew: what is lost is asked anew.
        since: The step after which a request may have been asked that the end of the job leaves
            without an answer, or ends with its server; none of the test's own may be.
    """
    due = {name: r for name, r in requests.items() if r.step < since or r.own}
    failed = {name: r.failed for name, r in due.items() if r.failed}
    assert not failed, failed
    assert len(requests) == asked
    assert Counter(len(r.names) for r in requests.values()) == {1: asked}
    forgotten = {name: r.step for name, r in due.items() if not r.got}
    assert not forgotten, f"asked after these steps and never answered: {forgotten}"
    for name, request in requests.items():
        tokens, log_probs = [], []
        for piece in request.pieces:
            assert piece["prompt"] == request.prompt + tokens, name  # from where it was
            tokens += piece["tokens"]
            log_probs += piece["log_probs"]
        for got in request.got:
            assert (got["tokens"], got["log_probs"]) == (tokens, log_probs), name


def moved(requests: dict[str, Request]) -> list[str]:
    """Name answered requests whose tokens are of several servers.

    verl's balancer sends a request to the same server for as long as that is listed, so all but the
    last of them have left.
    """
    return [
        name
        for name, request in requests.items()
        if request.got and len({piece["server"] for piece in request.told}) > 1
    ]


def furthest(requests: dict[str, Request], work: Path, model: Path) -> dict[tuple[int, int], float]:
    """Return how far log-probabilities are from the actor's, by server and version, at most.

    Every token of every piece is compared with what the actor's weights of the version that the
    server said it had make of it, in float64; in units in the last place of a float32. The next
    version's weights have to be far from it, or nothing would be held.
    """
    from transformers import AutoModelForCausalLM

    actor = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    by_version = defaultdict(list)
    for request in requests.values():
        for piece in request.told:
            by_version[piece["version"]].append(piece)
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    before = None
    for version, pieces in sorted(by_version.items()):
        if version:  # 0 is the model that the job began with
            actor.load_state_dict(torch.load(work / f"weights-{version}.pt"), strict=True)
        if before is not None:
            assert _apart(actor, before) > FAR, version
        for piece in pieces:
            found[piece["server"], version].append(_apart(actor, piece))
        before = pieces[0]
    return {key: max(apart) for key, apart in found.items()}


@torch.no_grad()
def _apart(actor, piece: dict) -> float:
    ids = torch.tensor([piece["prompt"] + piece["tokens"]])
    logits = actor(ids).logits[0, len(piece["prompt"]) - 1 : -1]
    chosen = torch.tensor(piece["tokens"])[:, None]
    right = torch.log_softmax(logits, -1).gather(1, chosen)[:, 0]
    apart = ulps(right, torch.tensor(piece["log_probs"], dtype=torch.float64)).max().item()
    assert isfinite(apart), piece
    return apart

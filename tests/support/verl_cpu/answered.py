"""Reads what `verl_cpu.answers` wrote, and holds it to what must be true of it."""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class Request:
    """One request of an agent loop."""

    prompt: list[int]
    names: list[str]
    """One for each time that it was asked; once is right."""
    got: list[dict] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    pieces: list[dict] = field(default_factory=list)
    """What servers answered of it, in that order."""
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
        request, kind = line["request"], line["kind"]
        if kind == "asked":
            known = found.setdefault(request, Request(line["prompt"], []))
            known.names.append(line["name"])
        elif kind == "failed":
            found[request].failed.append(line["error"])
        elif kind == "late":
            found[request].late = True
        else:
            {"got": found[request].got, "piece": found[request].pieces}[kind].append(line)
    return found


def require_none_lost(requests: dict[str, Request], asked: int, open_at_end: int) -> None:
    """Hold that each was asked once and answered once, by its pieces one after the other.

    Args:
        requests: As `read` returns them.
        asked: How many the job asks if it has to ask none anew: what is lost is asked anew.
        open_at_end: How many may be without an answer when the job ends.
    """
    failed = {name: r.failed for name, r in requests.items() if r.failed}
    assert not failed, failed
    assert len(requests) == asked
    assert Counter(len(r.names) for r in requests.values()) == {1: asked}
    answers = Counter(len(r.got) for r in requests.values())
    assert set(answers) <= {0, 1}
    assert answers[0] <= open_at_end, answers
    for name, request in requests.items():
        for got in request.got:
            tokens, log_probs = [], []
            for piece in request.pieces:
                assert piece["prompt"] == request.prompt + tokens, name  # from where it was
                tokens += piece["tokens"]
                log_probs += piece["log_probs"]
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
    server said it had make of it, in float64.
    """
    from transformers import AutoModelForCausalLM

    actor = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    by_version = defaultdict(list)
    for request in requests.values():
        for piece in request.told:
            by_version[piece["version"]].append(piece)
    found: dict[tuple[int, int], float] = {}
    for version, pieces in sorted(by_version.items()):
        if version:  # 0 is the model that the job began with
            actor.load_state_dict(torch.load(work / f"weights-{version}.pt"), strict=True)
        for piece in pieces:
            apart = _apart(actor, piece)
            key = piece["server"], version
            found[key] = max(found.get(key, 0.0), apart)
    return found


@torch.no_grad()
def _apart(actor, piece: dict) -> float:
    ids = torch.tensor([piece["prompt"] + piece["tokens"]])
    logits = actor(ids).logits[0, len(piece["prompt"]) - 1 : -1]
    chosen = torch.tensor(piece["tokens"])[:, None]
    right = torch.log_softmax(logits, -1).gather(1, chosen)[:, 0]
    return (right - torch.tensor(piece["log_probs"], dtype=torch.float64)).abs().max().item()

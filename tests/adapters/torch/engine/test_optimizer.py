"""The update is torch's own, and schedules are functions of the step."""

import math
from dataclasses import replace

import engine_peers as ep
import pytest
import torch

from nereus_adapters.torch.engine.optimizer import adamw_step, clip_factor, learning_rate

pytestmark = pytest.mark.real


def test_five_steps_have_the_bits_of_torch_adamw():
    draw = torch.Generator().manual_seed(0)
    spec = replace(ep.SPEC, schedule="constant", warmup_steps=0, betas=(0.8, 0.95))
    start = torch.randn(7, 5, generator=draw, dtype=torch.float64)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW(
        [theirs], lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay, foreach=False
    )
    ours, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(5):
        theirs.grad = torch.randn(7, 5, generator=draw, dtype=torch.float64)
        adamw_step(spec, step, ours, theirs.grad, first, second)
        optimizer.step()
    assert torch.equal(ours, theirs.detach())
    assert torch.equal(first, optimizer.state[theirs]["exp_avg"])
    assert torch.equal(second, optimizer.state[theirs]["exp_avg_sq"])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.5 + 0.25 * math.sqrt(2), 0.5, 0.5 - 0.25 * math.sqrt(2), 0.0]),
    ],
)
def test_schedules(schedule, expected):
    spec = replace(ep.SPEC, lr=1.0, warmup_steps=2, total_steps=6, schedule=schedule)
    assert [learning_rate(spec, step) for step in range(7)] == pytest.approx(expected)


def test_clipping_is_that_of_torch():
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    param.grad = torch.tensor([3.0, 0.0, 4.0, 0.0], dtype=torch.float64)
    norm = torch.nn.utils.clip_grad_norm_([param], 0.5)
    ours = torch.tensor([3.0, 0.0, 4.0, 0.0], dtype=torch.float64) * clip_factor(norm.item(), 0.5)
    assert torch.equal(param.grad, ours)
    assert clip_factor(0.3, 0.5) == 1.0
    assert clip_factor(100.0, math.inf) == 1.0

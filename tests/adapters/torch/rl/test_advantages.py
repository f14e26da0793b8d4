"""Advantages against values computed by hand."""

import pytest

torch = pytest.importorskip("torch")
from nereus_adapters.torch.rl import advantages  # noqa: E402

pytestmark = pytest.mark.real

# Two rows of one prompt token; responses of three and of two tokens.
MASK = torch.tensor([[False, True, True, True], [False, True, True, False]])


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_score_is_paid_at_the_last_token_and_leaving_the_reference_costs():
    logprobs = f64([[0, -1, -2, -3], [0, -1, -1, 9]])
    ref = f64([[0, -2, -2, -2], [0, -1, -3, 5]])
    rewards = advantages.token_rewards(f64([1.0, 2.0]), MASK, logprobs, ref, 0.1)
    expected = [[0, -0.1, 0.0, 1.1], [0, 0.0, 1.8, 0]]
    assert torch.allclose(rewards, f64(expected))


def test_gae_by_hand():
    """gamma 0.5, lambda 0.5: delta_t = r_t + 0.5 V_(t+1) - V_t, A_t = delta_t + 0.25 A_(t+1)."""
    rewards = f64([[0, 1, 0, 2], [0, 0, 1, 0]])
    values = f64([[9, 1, 2, 4], [9, 2, 1, 9]])
    found, returns = advantages.gae(rewards, values, MASK, 0.5, 0.5)
    # row 0: deltas 1+1-1=1, 0+2-2=0, 2-4=-2; A3=-2, A2=0-0.5=-0.5, A1=1-0.125=0.875
    # row 1: deltas 0+0.5-2=-1.5, 1-1=0; A2=0, A1=-1.5
    expected = f64([[0, 0.875, -0.5, -2], [0, -1.5, 0, 0]])
    assert torch.allclose(found, expected)
    assert torch.allclose(returns, f64([[0, 1.875, 1.5, 2], [0, 0.5, 1, 0]]))


def test_gae_with_lambda_one_is_reward_to_go_less_value():
    rewards = f64([[0, 1, 2, 3], [0, 4, 5, 0]])
    values = f64([[0, 7, 8, 9], [0, 1, 2, 0]])
    found, returns = advantages.gae(rewards, values, MASK, 1.0, 1.0)
    assert torch.allclose(returns, f64([[0, 6, 5, 3], [0, 9, 5, 0]]))
    assert torch.allclose(found, torch.where(MASK, returns - values, 0.0))


def test_whitened_has_mean_zero_and_variance_one_over_what_counts():
    values = f64([[100, 1, 2, 3], [100, 4, 5, 100]])
    found = advantages.whitened(values, MASK)
    assert found[MASK].mean().item() == pytest.approx(0.0, abs=1e-12)
    assert found[MASK].var(correction=0).item() == pytest.approx(1.0, abs=1e-6)
    assert found[~MASK].tolist() == [0, 0, 0]


def test_grpo_compares_within_a_group():
    """Group of 1 and 3: mean 2, deviation sqrt(2)."""
    found = advantages.grpo(f64([1.0, 3.0]), 2, MASK)
    high = 1 / (2**0.5 + 1e-6)
    assert torch.allclose(found, f64([[0, -high, -high, -high], [0, high, high, 0]]))


def test_grpo_of_equal_scores_is_zero():
    assert advantages.grpo(f64([2.0, 2.0]), 2, MASK).abs().max() == 0


def test_grpo_with_one_response_is_the_score():
    assert torch.equal(
        advantages.grpo(f64([2.0, -1.0]), 1, MASK), f64([[0, 2, 2, 2], [0, -1, -1, 0]])
    )


def test_remax_takes_the_greedy_score_off_the_reward_to_go():
    rewards = f64([[0, -0.5, 0, 1.0], [0, 0, 2.0, 0]])
    found = advantages.remax(rewards, f64([0.25, 1.0]), MASK)
    assert torch.allclose(found, f64([[0, 0.25, 0.75, 0.75], [0, 1, 1, 0]]))

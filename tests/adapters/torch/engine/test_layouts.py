"""Training, scoring and values give the same in every layout as on one rank."""

import engine_peers as ep
import numpy as np
import pytest
import torch

from nereus_adapters.torch.engine import combine
from nereus_core.layout import Layout
from nereus_core.state import Slot

pytestmark = pytest.mark.real
ONE = Layout(1, 1)

CASES = [
    pytest.param(ep.LLAMA, Layout(2, 1), 1, False, id="llama-tied-tp2"),
    pytest.param(ep.LLAMA, Layout(4, 1), 1, False, id="llama-tied-tp4-kv2"),
    pytest.param(ep.LLAMA, Layout(1, 2), 1, False, id="llama-tied-pp2"),
    pytest.param(ep.LLAMA, Layout(1, 3), 1, False, id="llama-tied-pp3-uneven"),
    pytest.param(ep.LLAMA, Layout(2, 2), 1, False, id="llama-tied-tp2pp2"),
    pytest.param(ep.LLAMA, Layout(1, 1), 4, False, id="llama-dp4"),
    pytest.param(ep.LLAMA, Layout(1, 1), 3, False, id="llama-dp3-uneven"),
    pytest.param(ep.LLAMA, Layout(2, 1), 2, False, id="llama-tp2dp2"),
    pytest.param(ep.LLAMA, Layout(1, 2), 2, False, id="llama-tied-pp2dp2"),
    pytest.param(ep.UNTIED, Layout(2, 2), 1, False, id="llama-untied-tp2pp2"),
    pytest.param(ep.QWEN2, Layout(4, 1), 1, False, id="qwen2-bias-tp4-kv2"),
    pytest.param(ep.QWEN3, Layout(2, 2), 1, False, id="qwen3-norms-tp2pp2"),
    pytest.param(ep.QWEN3, Layout(4, 1), 1, False, id="qwen3-norms-tp4-kv2"),
    pytest.param(ep.MISTRAL, Layout(2, 1), 2, False, id="mistral-window-tp2dp2"),
    pytest.param(ep.GEMMA, Layout(2, 2), 1, False, id="gemma-kv1-tp2pp2"),
    pytest.param(ep.LLAMA, Layout(2, 2), 1, True, id="critic-tp2pp2"),
    pytest.param(ep.LLAMA, Layout(2, 1), 2, True, id="critic-tp2dp2"),
]


@pytest.fixture(scope="module")
def alone():
    """Metrics and tensors of the same training on one rank, made once per model."""
    made = {}

    def train(config, value):
        key = (config["model_type"], config["tie_word_embeddings"], value)
        if key not in made:
            shard = ep.build(config, ONE, 0, value=value)
            shard.init(seed=3)
            metrics = ep.train_steps(shard, ep.STEPS, 0, 1, value=value)
            made[key] = metrics, ep.tensors_of(shard)
        return made[key]

    return train


@pytest.mark.parametrize(("config", "layout", "num_units", "value"), CASES)
def test_training_equals_one_rank(peers, alone, config, layout, num_units, value):
    expected_metrics, expected = alone(config, value)
    size = layout.num_devices * num_units
    results = peers.run(size, ep.train_job, config, layout, num_units, ep.STEPS, value)

    copies = {}
    for metrics, tensors, _, counters in results:
        assert counters == {"step": ep.STEPS, "weight_version": ep.STEPS}
        assert metrics == results[0][0], "metrics differ between ranks"
        for mine, theirs in zip(metrics, expected_metrics, strict=True):
            assert mine.loss == pytest.approx(theirs.loss, abs=1e-9)
            assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-9)
            assert mine.clip_fraction == pytest.approx(theirs.clip_fraction, rel=1e-12)
            assert mine.lr == theirs.lr
        for key, (box, values) in tensors.items():
            whole = expected[key][1]
            where = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
            np.testing.assert_allclose(values, whole[where], rtol=0, atol=1e-9, err_msg=str(key))
            # Every copy of a box, in the unit or in another unit, has the same bits.
            first = copies.setdefault((key, box), values)
            np.testing.assert_array_equal(values, first, err_msg=f"copies of {key} differ")
    assert {key for key, _ in copies} == set(expected)


def test_training_changes_what_it_should(alone):
    """Guards the comparison above: steps move every tensor by far more than its tolerance."""
    start = ep.build(ep.QWEN3, ONE, 0)
    start.init(seed=3)
    _, after = alone(ep.QWEN3, False)
    for name in start.names:
        moved = np.abs(after[Slot.PARAM, name][1] - start.tensor(Slot.PARAM, name).numpy())
        assert moved.max() > 1e-4, name


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=str
)
def test_narrower_types_stay_near(peers, dtype, tolerance):
    """Groups, pipeline and sampling carry every type; rounding sets how near they stay."""
    shard = ep.build(ep.LLAMA, ONE, 0, dtype=dtype)
    shard.init(seed=3)
    expected = [m.loss for m in ep.train_steps(shard, ep.STEPS, 0, 1, dtype=torch.float32)]
    results = peers.run(4, ep.dtype_job, Layout(2, 2), dtype)
    assert all(result == results[0] for result in results)
    assert results[0][0] == pytest.approx(expected, rel=tolerance)


def test_a_lost_unit_leaves_the_others_as_they_were_and_able_to_go_on(peers, alone):
    expected_metrics, _ = alone(ep.LLAMA, False)
    for unchanged, metrics in peers.run(4, ep.lost_job)[:2]:
        assert unchanged
        assert metrics.loss == pytest.approx(expected_metrics[1].loss, abs=1e-9)
        assert metrics.grad_norm == pytest.approx(expected_metrics[1].grad_norm, rel=1e-9)


def test_a_unit_without_sequences_takes_part(peers, alone):
    expected_metrics, _ = alone(ep.LLAMA, False)
    (first, bits), (second, other_bits) = peers.run(2, ep.empty_job)
    assert first == second
    assert bits == other_bits
    assert first.loss == pytest.approx(expected_metrics[0].loss, abs=1e-9)


@pytest.mark.parametrize("value", [False, True], ids=["logprobs", "values"])
@pytest.mark.parametrize("layout", [Layout(4, 1), Layout(1, 3), Layout(2, 2)], ids=str)
def test_inference_equals_one_rank(peers, layout, value):
    shard = ep.build(ep.LLAMA, ONE, 0, value=value)
    shard.init(seed=3)
    batch = ep.batch_of(0)
    expected = (shard.values if value else shard.logprobs)(batch).numpy()
    assert (expected[~batch.response_mask.numpy()] == 0).all()
    results = peers.run(layout.num_devices, ep.infer_job, ep.LLAMA, layout, value)
    for rank, found in enumerate(results):
        if rank < layout.num_devices - layout.tp:
            assert found is None
        else:
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("layout", [Layout(4, 1), Layout(1, 3), Layout(2, 2)], ids=str)
def test_digests_do_not_depend_on_the_layout(peers, layout):
    shard = ep.build(ep.LLAMA, ONE, 0)
    shard.init(seed=3)
    partials = peers.run(layout.num_devices, ep.digest_job, ep.LLAMA, layout, None)
    assert combine(partials) == combine([shard.digests()])


def test_a_changed_bit_changes_one_digest(peers):
    name = "model.layers.2.mlp.down_proj.weight"
    clean = combine(peers.run(4, ep.digest_job, ep.LLAMA, Layout(4, 1), None))
    spoiled = combine(peers.run(4, ep.digest_job, ep.LLAMA, Layout(4, 1), (2, name)))
    assert {k for k in clean if clean[k] != spoiled[k]} == {f"param/{name}"}

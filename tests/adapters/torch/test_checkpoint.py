"""A job that was saved goes on anywhere: other seats, other layouts, the same figures."""

import json
import stat
from dataclasses import replace

import pytest

from nereus_adapters.torch.job import TorchJob
from nereus_adapters.torch.manifest import Manifest
from nereus_adapters.torch.rl.tasks import CopyTask
from nereus_adapters.torch.settings import RlSettings
from nereus_core.errors import CheckpointError, UnitLost
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, CRITIC_TRAIN, REF_INFER

pytestmark = pytest.mark.real


def launched(harness, tools, placements, *, seats=4, algorithm="grpo", resume=None, **changes):
    """Start a job on the first few of the warm seats."""
    harness._end()
    job = harness.job(algorithm)
    gone = job.cluster.devices[seats:]
    plan = tools.packed(job, placements)
    job = job.on(job.cluster.without(gone))
    task = CopyTask(job.models["actor"].vocab, 0, 4 if algorithm == "grpo" else 8, (3, 6), 8)
    settings = RlSettings(
        responses_per_prompt=2 if algorithm == "grpo" else 1, step_s=60, transfer_s=60,
        boundary_s=60, **changes,
    )  # fmt: skip
    running = TorchJob(
        job, plan, harness.sources(job), task, settings, harness.pool, owns_pool=False,
        resume=resume,
    )  # fmt: skip
    harness._running = running
    return running


def figures(running, steps):
    """Return the metrics of the next steps."""
    return [dict(running.step()) for _ in range(steps)]


WIDE = {ACTOR_TRAIN: (Layout(2, 1), 2), ACTOR_GENERATE: (Layout(1, 1), 2)}


@pytest.fixture(scope="module")
def saved(pool, tools, tmp_path_factory):
    """Two steps at tp2 dp2 on four seats, saved; and what the next two steps give."""
    harness = tools.TorchHarness(pool=pool)
    running = launched(harness, tools, WIDE)
    figures(running, 2)
    folder = tmp_path_factory.mktemp("checkpoints") / "step-00000002"
    running.save(folder)
    state = tools.sha256(harness.peek(running.units.of(ACTOR_TRAIN)[0].id))
    expected = figures(running, 2)
    harness.close()
    return folder, state, expected


@pytest.mark.parametrize(
    ("seats", "placements"),
    [
        (1, {}),
        (2, {ACTOR_TRAIN: (Layout(1, 2), 1), REF_INFER: (Layout(2, 1), 1)}),
        (3, {ACTOR_TRAIN: (Layout(1, 1), 2), ACTOR_GENERATE: (Layout(1, 2), 1)}),
        (4, {ACTOR_TRAIN: (Layout(2, 2), 1), ACTOR_GENERATE: (Layout(4, 1), 1)}),
    ],
    ids=["1 seat", "2 seats tp1pp2", "3 seats", "4 seats tp2pp2"],
)
def test_a_job_resumes_on_other_seats_and_layouts(harness, tools, saved, seats, placements):
    folder, state, expected = saved
    running = launched(harness, tools, placements, seats=seats, resume=folder)
    assert running.steps_done == 2
    assert running.units.stages()
    for unit in running.units.of(ACTOR_TRAIN):
        assert tools.sha256(harness.peek(unit.id)) == state
    for one, other in zip(figures(running, 2), expected, strict=True):
        assert one == pytest.approx(other, abs=1e-9)
    assert all(d in running.job.cluster.devices[:seats] for u in running.units for d in
               running.units[u].devices)  # fmt: skip


def test_both_trained_models_of_ppo_are_saved(harness, tools, tmp_path):
    running = launched(harness, tools, {CRITIC_TRAIN: (Layout(2, 1), 1)}, algorithm="ppo")
    figures(running, 1)
    running.save(tmp_path / "one")
    expected = figures(running, 1)
    assert set(Manifest.read(tmp_path / "one").stages) == {ACTOR_TRAIN, CRITIC_TRAIN}
    placements = {CRITIC_TRAIN: (Layout(1, 2), 1), ACTOR_TRAIN: (Layout(1, 1), 2)}
    running = launched(
        harness, tools, placements, algorithm="ppo", resume=tmp_path / "one"
    )  # fmt: skip
    assert figures(running, 1)[0] == pytest.approx(expected[0], abs=1e-9)


def test_a_checkpoint_is_private_striped_and_holds_each_box_once(saved):
    folder, _, _ = saved
    manifest = Manifest.read(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(f.stat().st_mode) for f in folder.iterdir()} == {0o600}
    assert len(manifest.files) == 4  # two units of two ranks share the writing
    assert max(manifest.files.values()) < 2 * min(manifest.files.values())
    pieces = [(p.tensor, p.box) for p in manifest.stages[ACTOR_TRAIN].pieces]
    assert len(pieces) == len(set(pieces))
    assert REF_INFER not in manifest.stages
    assert list(folder.parent.iterdir()) == [folder]


def test_saving_again_replaces_what_was_there(harness, tools, tmp_path):
    running = launched(harness, tools, {})
    running.save(tmp_path / "x")
    figures(running, 1)
    running.save(tmp_path / "x")
    assert Manifest.read(tmp_path / "x").step == 1
    assert [f.name for f in tmp_path.iterdir()] == ["x"]


# --- What is refused ------------------------------------------------------------------------------


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of the checkpoint to break."""
    import shutil

    return shutil.copytree(saved[0], tmp_path / "copy")


def refused(harness, tools, folder, match, **changes):
    with pytest.raises(CheckpointError, match=match):
        launched(harness, tools, {}, seats=1, resume=folder, **changes)


def test_a_broken_manifest_is_named(harness, tools, copy):
    manifest = copy / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text[: len(text) // 2])
    refused(harness, tools, copy, r"manifest\.json cannot be read")
    manifest.write_text(text.replace('"step": 2', '"step": 3'))
    refused(harness, tools, copy, r"manifest\.json does not fit its own digest")
    manifest.unlink()
    refused(harness, tools, copy, r"manifest\.json cannot be read: .*No such file")


def test_a_missing_or_shortened_file_is_named(harness, tools, copy):
    file = copy / "actor-train-0001.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-8])
    refused(harness, tools, copy, rf"{file.name} has {len(data) - 8} bytes, the manifest says")
    file.unlink()
    refused(harness, tools, copy, rf"file {file.name} is missing; resume from another")


def test_a_changed_value_is_named(harness, tools, copy):
    file = copy / "actor-train-0002.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    refused(harness, tools, copy, rf"{file.name}.* has digest .*the manifest says")


def test_another_job_is_named(harness, tools, copy):
    refused(harness, tools, copy, r"seed is 0 there, 1 here", seed=1)
    harness_job = harness.job
    harness.job = lambda algorithm="grpo": replace(harness_job(), global_batch=4)
    refused(harness, tools, copy, r"global_batch is 8 there, 4 here")


def test_another_model_is_named(pool, tools, copy):
    other = tools.TorchHarness(pool=pool, hf_config=tools.TINY_CONFIG | {"hidden_size": 64})
    refused(other, tools, copy, r"models\.actor\.config\.hidden_size is 32 there, 64 here")
    other.close()


def test_other_weights_of_a_frozen_model_are_named(harness, tools, copy, tmp_path):
    from nereus_adapters.torch.engine import export_model

    other = export_model(tools.TINY_CONFIG, tmp_path / "other", seed=7)
    harness._model = other
    refused(harness, tools, copy, r"ref/infer had other weights")


def test_a_step_that_was_cut_short_is_not_saved(harness, tools, tmp_path):
    running = launched(harness, tools, {})
    device = running.job.cluster.devices[0]
    harness.pool.call(device, "fail_at", phase="train", kind="raise").wait(60)
    with pytest.raises(Exception, match="fault was injected"):
        running.step()
    with pytest.raises(CheckpointError, match="step 0 was cut short"):
        running.save(tmp_path / "x")
    running.step()
    running.save(tmp_path / "x")


def test_a_seat_that_dies_while_saving_leaves_no_folder(harness, tools, tmp_path):
    running = launched(harness, tools, {ACTOR_TRAIN: (Layout(1, 1), 2)})
    victim = running.job.cluster.devices[1]
    harness.pool.call(victim, "fail_at", phase="save", kind="kill").wait(60)
    with pytest.raises(UnitLost, match="actor/train#1"):
        running.save(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
    running.relink()
    running.save(tmp_path / "x")
    assert json.loads((tmp_path / "x" / "manifest.json").read_text())["step"] == 0
    harness.pool.start([victim])


def test_a_full_disk_is_named(harness, tools, tmp_path):
    running = launched(harness, tools, {})
    (tmp_path / "file").write_text("")
    with pytest.raises((CheckpointError, OSError)):
        running.save(tmp_path / "file" / "x")


def test_the_plan_of_a_checkpoint_is_kept_where_it_can_be(harness, saved):
    from nereus_adapters.torch.setup import resumable, simplest

    job, plan = harness.job(), Manifest.read(saved[0]).plan
    assert isinstance(plan, Plan)
    assert resumable(plan, job) == plan
    small = job.on(job.cluster.without(job.cluster.devices[2:]))
    assert resumable(plan, small) == simplest(small)
    assert simplest(small)[ACTOR_TRAIN] == Placement.packed(Layout(1, 1), job.cluster.devices[:2])

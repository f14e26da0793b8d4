"""A checkpoint of a changed job: stock OpenRLHF goes on from it, on as many ranks or on others."""

import shutil
import subprocess
import sys

import openrlhf_job
import pytest
from openrlhf_seen import adapt, drift, layouts, require_same_state

pytestmark = pytest.mark.real

JOB = {
    "algo__advantage__estimator": "reinforce",
    "algo__kl__init_coef": 0,
    "algo__kl__use_loss": False,
    "algo__advantage__is_correction_level": "off",
    "ds__grad_accum_dtype": "fp32",
    "actor__adam__lr": 1e-4,
    "actor__num_gpus_per_node": 2,
    "data__max_samples": 32,
    "ckpt__save_steps": 1,
    "ckpt__max_num": 4,
}
TAG = "global_step2"


@pytest.fixture(scope="module")
def changed(assets, recorded, tmp_path_factory):
    """A job that went from two ranks to one after its first step, and saved all four steps."""
    folder = tmp_path_factory.mktemp("changed")
    job = JOB | {"train__agent_func_path": recorded}
    ran, (record,), _ = adapt(assets, folder, {"1": {"actor/train": [[0]]}}, **job)
    require_same_state(record)
    assert layouts(record, "actor/train") == [1]
    assert [step["step"] for step in ran.steps()] == [1.0, 2.0, 3.0, 4.0]
    return folder, ran.steps(), job


def copied(changed, folder):
    """Copy the checkpoint of the second step, made on one rank, as the only one."""
    source = changed[0] / "ckpt" / "_actor"
    target = folder / "ckpt" / "_actor"
    target.mkdir(parents=True)
    shutil.copytree(source / TAG, target / TAG)
    (target / "latest").write_text(TAG)
    return target


def require_it_goes_on(changed, assets, folder, **flags):
    """Stock OpenRLHF runs steps 3 and 4 from there, and learns what the changed job learned."""
    ran = openrlhf_job.run(
        openrlhf_job.flags(assets, folder, ckpt__load_enable=True, **changed[2] | flags),
        folder,
        module="openrlhf.cli.train_ppo_ray",
    )
    assert ran.code == 0, ran.output[-6000:]
    steps = ran.steps()
    assert [step["step"] for step in steps] == [3.0, 4.0]
    for step, was in zip(steps, changed[1][2:], strict=True):
        assert step["reward"] == pytest.approx(was["reward"], rel=0.02)
    # a moment, a step count or a learning rate that was lost would change Adam's steps at once
    apart = drift(assets / "model", changed[0] / "final", folder / "final")
    assert apart < 1 / 12


def test_stock_openrlhf_goes_on_from_a_checkpoint_made_after_a_change(changed, assets, tmp_path):
    copied(changed, tmp_path)
    require_it_goes_on(changed, assets, tmp_path, actor__num_gpus_per_node=1)


def test_it_goes_on_with_another_number_of_devices(changed, assets, tmp_path):
    """Through DeepSpeed's own universal form, which OpenRLHF reads."""
    folder = copied(changed, tmp_path)
    subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal",
         "--input_folder", str(folder / TAG), "--output_folder", str(folder / f"{TAG}_universal"),
         "--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"],
        check=True, timeout=300, env=openrlhf_job.environment(tmp_path, 8),
    )  # fmt: skip
    (folder / "latest_universal").write_text(f"{TAG}_universal")
    require_it_goes_on(
        changed, assets, tmp_path, actor__num_gpus_per_node=2, ds__use_universal_ckpt=True
    )

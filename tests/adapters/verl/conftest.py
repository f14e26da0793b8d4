"""Real ``python -m verl.trainer.main_ppo`` jobs on CPU, each run once for all its tests."""

import json
from collections.abc import Callable, Iterator

import pytest
from verl_cpu import outgrown
from verl_cpu.alike import CRITIC_FIGURES, FIGURES, TELLING, allowed, gaps
from verl_cpu.assets import make_assets
from verl_cpu.command import environment, overrides, run_job
from verl_cpu.job import Job
from verl_cpu.stem import warm

STEPS = 6
JOB_S = 900
"""A job of six steps takes about a minute on two cores that do nothing else; a limit of this much
is for a job that hangs. Chosen, not measured."""
SAVED_STEP = 3
"""The GRPO job that is resumed is saved after this step, while it is sharded as HSDP 2x2."""
WIDE = {"actor/generate": ["tp1pp1", 4], "actor/train": ["tp2pp1", 4]}
NARROW = {"actor/generate": ["tp1pp1", 2], "actor/train": ["tp2pp1", 2]}
GRPO_PLANS = {
    1: {"actor/generate": ["tp2pp1", 2]},
    2: WIDE,
    3: {"actor/train": ["tp4pp1", 4]},
    4: NARROW,  # the ranks refuse to meet, once
    5: NARROW,
}
"""Rollout TP1x2 -> TP2x1 -> TP1x4 -> TP1x2; actor 2 ranks -> HSDP 2x2 -> FSDP 4 -> 2."""
PPO_PLANS = {
    1: {"critic/train": ["tp1pp1", 2]},
    2: {"ref/infer": ["tp1pp1", 2]},
    3: {**WIDE, "critic/train": ["tp2pp1", 4], "ref/infer": ["tp1pp1", 4]},
    4: {**NARROW, "critic/train": ["tp2pp1", 2], "ref/infer": ["tp2pp1", 2]},
    6: {"actor/train": ["tp1pp1", 2]},  # rank 1 is killed as it sends its part
}
"""Critic and reference alone, then all of them to twice the devices and back."""
FORCED = (
    "+nereus.timeouts.step_s=300",
    "+nereus.timeouts.primitive_s=300",
    "+nereus.policy.admission=never",
)
"""No decision but those that a test takes; waits end before the job's own limit does."""
BOUNDARY = "+nereus.timeouts.boundary_s=300"
HANGS = "+nereus.timeouts.boundary_s=60"
"""Of the job whose weight synchronization hangs, which is waited for."""
ROOM = "+nereus.backend.max_devices=4"


@pytest.fixture(scope="session")
def stem(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What Ray starts its workers with."""
    folder = tmp_path_factory.mktemp("stem")
    with warm(folder, environment(folder)) as command:
        yield command


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory, stem: str) -> Callable[..., Job]:
    """Run a job: ``launch(name, *more overrides, plans=..., env=..., nereus=..., **shape)``."""
    usual = make_assets(tmp_path_factory.mktemp("assets"))

    def run(name, *extra, plans=None, env=None, nereus=True, assets=usual, **shape):
        work = tmp_path_factory.mktemp(name)
        modules = ["verl_cpu.platform", "verl_cpu.rollout"]
        changes = dict(env or {})
        if plans is not None:
            modules.append("verl_cpu.forced")
            changes["VERL_CPU_FORCED"] = json.dumps(plans)
            changes["VERL_CPU_FORCED_LOG"] = str(work / "forced.jsonl")
        arguments = [*overrides(assets, work, **{"steps": STEPS, **shape}), *extra]
        arguments.append(f"+ray_kwargs.ray_init.runtime_env.py_executable='{stem}'")
        if nereus:
            arguments += ["+nereus.enable=true", f"+nereus.run_dir={work}/run"]
        changes["VERL_USE_EXTERNAL_MODULES"] = ",".join(modules)
        return Job(run_job(work, arguments, timeout_s=JOB_S, env=changes), work)

    return run


@pytest.fixture(scope="session")
def jobs(launch) -> Callable[[str], Job]:
    """Return a job by name, running it the first time it is asked for.

    Jobs that are to fail do so after the last step that a test looks at.
    """

    def fixed_grpo():
        admission = "+nereus.policy.admission='saving>0'"  # something is advised
        return launch("fixed-grpo", "+nereus.mode=advise", admission)

    def forced_grpo():
        fault = {"VERL_CPU_FAULT": f"refuse-join:4,hang-sync:{STEPS}"}
        return launch(
            "forced-grpo", *FORCED, HANGS, ROOM, plans=GRPO_PLANS, ray_devices=4, env=fault
        )

    def saved_grpo():
        save = f"trainer.save_freq={SAVED_STEP}"
        shape = {"plans": {2: WIDE}, "ray_devices": 4, "steps": SAVED_STEP}
        return launch("saved-grpo", *FORCED, BOUNDARY, ROOM, save, **shape)

    def fixed_ppo():
        fault = {"VERL_CPU_FAULT": f"kill-server:{STEPS - 1}"}
        return launch("fixed-ppo", *FORCED, BOUNDARY, env=fault, critic=True)

    def forced_ppo():
        fault = {"VERL_CPU_FAULT": f"kill-rank:{STEPS}"}
        return launch(
            "forced-ppo",
            *FORCED,
            BOUNDARY,
            ROOM,
            plans=PPO_PLANS,
            ray_devices=4,
            env=fault,
            critic=True,
        )

    def resumed(name, **shape):
        before = job("saved-grpo")
        assert before.ran.returncode == 0, before.ran.output[-4000:]
        saved = before.work / "checkpoints" / f"global_step_{SAVED_STEP}"
        return launch(
            name,
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={saved}",
            steps=SAVED_STEP + 2,
            **shape,
        )

    def wide(name, **shape):
        return launch(name, nereus=False, devices=4, shard_size=2, steps=STEPS - 1, **shape)

    known = {
        "fixed-grpo": fixed_grpo,
        "again-grpo": lambda: launch("again-grpo", nereus=False, steps=3),
        "wide-grpo": lambda: wide("wide-grpo"),
        "forced-grpo": forced_grpo,
        "saved-grpo": saved_grpo,
        "fixed-ppo": fixed_ppo,
        "forced-ppo": forced_ppo,
        "wide-ppo": lambda: wide("wide-ppo", critic=True),
        "stock-resumed": lambda: resumed("stock-resumed", nereus=False, devices=4, shard_size=2),
        "resumed": lambda: resumed("resumed"),
    }

    ended: dict[str, Job | BaseException] = {}

    def job(name: str) -> Job:
        if name not in ended:
            try:
                ended[name] = known[name]()
            except BaseException as error:  # one that hangs is not waited for by every test
                ended[name] = error
        found = ended[name]
        if isinstance(found, BaseException):
            raise found
        return found

    return job


@pytest.fixture(scope="session")
def tolerance(jobs) -> Callable[[str], dict[str, float]]:
    """Return, by figure, how far from the fixed job a changed one of a kind may stray.

    Measured: jobs of stock verl that are never changed differ too. On four ranks (HSDP 2x2) sums
    are added up in another order than on two; for GRPO the same two ranks run twice as well.
    """

    def found(case: str) -> dict[str, float]:
        fixed = jobs(f"fixed-{case}").ran.metrics
        figures = FIGURES if case == "grpo" else (*FIGURES, *CRITIC_FIGURES)
        pairs = {}
        for name in (f"wide-{case}", *(["again-grpo"] if case == "grpo" else ())):
            other = jobs(name).ran
            assert other.returncode == 0, other.output[-4000:]
            pairs[name] = gaps(fixed[: len(other.metrics)], other.metrics, figures)
        print(f"from fixed-{case} differ: {pairs}")
        limits = allowed(*pairs.values())
        assert max(limits.values()) < TELLING, (
            f"fixed jobs differ too much to compare with: {pairs}"
        )
        return limits

    return found


@pytest.fixture(scope="session")
def outgrowing(launch, tmp_path_factory) -> Callable[..., Job]:
    """Run the job that outgrows two ranks: ``outgrowing(nereus=...)``."""
    assets = make_assets(tmp_path_factory.mktemp("wide"), **outgrown.MODEL)

    def run(*, nereus: bool) -> Job:
        more = [*outgrown.OVERRIDES, *(outgrown.SWITCH if nereus else ())]
        name = "outgrown-adapted" if nereus else "outgrown-fixed"
        env = outgrown.environment()
        return launch(name, *more, env=env, nereus=nereus, assets=assets, **outgrown.SHAPE)

    return run

"""Real ``python -m verl.trainer.main_ppo`` jobs on CPU whose rollouts are vLLM's, each run once."""

import json
from collections.abc import Callable, Iterator

import pytest
from verl_cpu import vllm_rollout
from verl_cpu.assets import make_assets
from verl_cpu.command import environment, overrides, run_job
from verl_cpu.job import Job
from verl_cpu.stem import warm

STEPS = 6
JOB_S = 1500
"""A job of six steps takes about two minutes on two cores that do nothing else, and one whose
replicas start again and again many more on two that do; a limit of this much is for a job that
hangs. Chosen, not measured."""
PLANS = {
    1: {"actor/generate": ["tp2pp1", 2]},
    2: {"actor/generate": ["tp1pp1", 2]},
    4: {"actor/generate": ["tp2pp1", 2]},
}
"""TP1 x 2 -> TP2 -> TP1 x 2 -> TP2: what slept is woken from the second change on."""
NEREUS = (
    "+nereus.enable=true",
    "+nereus.timeouts.step_s=90",
    "+nereus.timeouts.primitive_s=180",
    "+nereus.timeouts.boundary_s=120",
    "+nereus.policy.admission=never",
)
"""No decision but those that a test takes; waits end before the job's own limit does."""


@pytest.fixture(scope="session")
def changes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What vLLM needs in the environment."""
    return vllm_rollout.environment(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def stem(tmp_path_factory: pytest.TempPathFactory, changes: dict[str, str]) -> Iterator[str]:
    """What Ray starts its workers with; where Python looks for packages is the stem's own."""
    folder = tmp_path_factory.mktemp("stem")
    with warm(folder, environment(folder, **changes)) as command:
        yield command


@pytest.fixture(scope="session")
def launch(
    tmp_path_factory: pytest.TempPathFactory, stem: str, changes: dict[str, str]
) -> Callable[..., Job]:
    """Run a job: ``launch(name, *more overrides, plans=..., fault=..., answers=..., **shape)``."""
    assets = make_assets(tmp_path_factory.mktemp("assets"))

    def run(name, *extra, plans=None, fault="", answers=False, **shape):
        work = tmp_path_factory.mktemp(name)
        modules = ["verl_cpu.platform", "verl_cpu.rollout", "verl_cpu.vllm_rollout"]
        env = {**changes, "VERL_CPU_FAULT": fault}
        if plans is not None:
            modules.append("verl_cpu.forced")
            env["VERL_CPU_FORCED"] = json.dumps(plans)
            env["VERL_CPU_FORCED_LOG"] = str(work / "forced.jsonl")
        if answers:
            modules.append("verl_cpu.answers")
        env["VERL_USE_EXTERNAL_MODULES"] = ",".join(modules)
        shape = {"steps": STEPS, **shape}
        arguments = [*overrides(assets, work, **shape), *vllm_rollout.OVERRIDES, *extra]
        arguments.append(f"+ray_kwargs.ray_init.runtime_env.py_executable='{stem}'")
        if extra:
            arguments.append(f"+nereus.run_dir={work}/run")
        return Job(run_job(work, arguments, timeout_s=JOB_S, env=env), work)

    return run


@pytest.fixture(scope="session")
def jobs(launch) -> Callable[[str], Job]:
    """Return a job by name, running it the first time it is asked for."""
    known = {
        "stock": lambda: launch("stock"),
        # It fails after the last step that is compared.
        "fixed": lambda: launch("fixed", *NEREUS, fault=f"kill-server:{STEPS - 1}"),
        "changed": lambda: launch("changed", *NEREUS, plans=PLANS),
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

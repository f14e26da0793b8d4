"""The verl plugin without verl: what it imports, and when it speaks."""

import subprocess
import sys
import textwrap


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


FRAMEWORK = """
    import sys, types

    def module(name, **parts):
        found = sys.modules[name] = types.ModuleType(name)
        found.__path__ = []
        vars(found).update(parts)
        return found
"""


def test_it_imports_nothing_but_the_standard_library():
    ran = run(
        """
        import sys
        before = set(sys.modules)
        import nereus_plugins.verl
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        print(sorted(new - set(sys.stdlib_module_names) - {"nereus_plugins"}))
        """
    )
    assert (ran.returncode, ran.stdout.strip(), ran.stderr) == (0, "[]", "")


def test_a_module_is_seen_right_after_its_import(tmp_path):
    (tmp_path / "awaited.py").write_text("value = 1\n")
    ran = run(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from nereus_plugins.post_import import after_import
        seen = []
        after_import("awaited", lambda module: seen.append(module.value))
        assert seen == []
        import awaited
        assert seen == [1]
        after_import("awaited", lambda module: seen.append(2))
        assert seen == [1, 2]
        """
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_without_the_key_the_frameworks_own_trainer_is_built():
    ran = run(
        FRAMEWORK
        + """
    class Trainer:
        def __init__(self, config):
            self.config = config

    registry = {"sync": Trainer}
    module("verl"), module("verl.trainer"), module("verl.trainer.ppo")
    module("verl.trainer.ppo.v1"), module("verl.trainer.ppo.v1.trainer_base",
                                          TRAINER_REGISTRY=registry)
    import nereus_plugins.verl
    assert registry["sync"] is not Trainer and registry["sync"].__name__ == "Trainer"
    built = registry["sync"](config={"a": 1})
    assert type(built) is Trainer and built.config == {"a": 1}
    """
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_verl_that_is_not_the_known_one_is_said_loudly_and_goes_on():
    ran = run(
        FRAMEWORK
        + """
    module("verl"), module("verl.trainer"), module("verl.trainer.ppo")
    module("verl.trainer.ppo.v1"), module("verl.trainer.ppo.v1.trainer_base")
    import nereus_plugins.verl
    print("goes on")
    """
    )
    assert ran.stdout.strip() == "goes on"
    assert "[nereus] WARNING: OFF for this verl job" in ran.stderr
    assert "TRAINER_REGISTRY" in ran.stderr
    assert "nereus doctor verl" in ran.stderr


ENGINES = (
    FRAMEWORK
    + """
    for name in ("verl", "verl.trainer", "verl.workers", "verl.workers.engine",
                 "verl.workers.engine.fsdp", "verl.workers.engine.fsdp.transformer_impl"):
        module(name)
    constants = module("verl.trainer.constants_ppo",
                       get_ppo_ray_runtime_env=lambda config=None: {"env_vars": {"A": "1"}})
"""
)


def test_without_the_key_the_jobs_processes_get_verls_own_environment_and_engines():
    ran = run(
        ENGINES
        + """
    import nereus_plugins.verl
    for config in (None, {}, {"a": 1}):
        assert constants.get_ppo_ray_runtime_env(config) == {"env_vars": {"A": "1"}}
    assert "nereus_adapters" not in sys.modules
    """
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_an_engine_that_was_asked_for_and_cannot_be_had_is_no_engine_of_verls():
    ran = run(
        ENGINES
        + """
    import os
    os.environ["VERL_ENGINE_VENDOR"] = "nereus"
    import nereus_plugins.verl
    """
    )
    assert ran.returncode == 1
    assert "No module named 'verl.workers.engine.base'" in ran.stderr

import subprocess
import sys
from importlib import metadata

import pytest

pytestmark = pytest.mark.skipif(
    "nereus" not in {p.name for p in metadata.entry_points(group="pytest11")},
    reason="nereus is not installed here: its pytest plugin cannot be found",
)


def pytest_in(folder, *args, prelude="import pytest"):
    code = f"{prelude}; import sys; code = pytest.main({list(args)!r}); {{}}; sys.exit(code)"
    looked_for = {"numpy", "hypothesis", "nereus_core", "torch"}
    check = f"print('loaded:', sorted({looked_for!r} & set(sys.modules)))"
    return subprocess.run(
        [sys.executable, "-c", code.format(check)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_the_option_the_plugin_imports_nothing(tmp_path):
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    # Hypothesis has a pytest plugin of its own, which would be seen here.
    run = pytest_in(tmp_path, "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")

    assert run.returncode == 0, run.stdout
    assert "loaded: []" in run.stdout
    assert "nereus" not in run.stdout.replace("loaded", "")


def test_without_the_option_no_case_is_collected(tmp_path):
    run = pytest_in(tmp_path, "-p", "no:cacheprovider", "--pyargs", "nereus_conformance")

    assert run.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, run.stdout


def test_header_and_table_say_what_was_held_to_what(tmp_path):
    run = pytest_in(
        tmp_path,
        *("-p", "no:cacheprovider", "--pyargs", "nereus_conformance", "--adapter=sim"),
        *("-k", "test_split_keeps_parameters"),
    )

    assert "adapter sim (nereus 0" in run.stdout
    assert "backend none · tier contract · seed 0" in run.stdout
    assert "  split        passed       passed       passed" in run.stdout
    assert "  merge        not run      not run      not run" in run.stdout


def test_a_tier_without_a_harness_is_refused(tmp_path):
    run = pytest_in(
        tmp_path, "-p", "no:cacheprovider", "--pyargs", "nereus_conformance",
        "--adapter=sim", "--tier=gpu",
    )  # fmt: skip

    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "adapter 'sim' has no harness for tier gpu; it declares contract" in run.stderr


def test_tied_stages_are_arranged_on_the_same_devices_or_the_case_is_skipped(tmp_path):
    run = pytest_in(
        tmp_path, "-p", "no:cacheprovider", "--pyargs", "nereus_conformance", "-v", "-rs",
        "--adapter=sim", "--harness", "stages=together",
        "-k", "destroy or extend or across_model_stages or hand_over or planned_transition",
    )  # fmt: skip

    assert run.returncode == 0, run.stdout
    for case in ("test_destroy_removes_the_unit[train]", "test_extend_adds_one_unit[generate]"):
        assert f"{case} PASSED" in run.stdout
    assert "test_merge_across_model_stages_is_refused SKIPPED" in run.stdout
    apart = (
        "actor/generate is tied to actor/train: the case wants a unit of each on devices of its own"
    )
    assert apart in run.stdout

import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Slow and broad: it finds most faults too, so it tells little of the case named after a fault.
QUICK = "not random_walk and not random_launch and not faults_in_transitions"


@dataclass
class Run:
    code: int
    output: str
    report: dict

    def named(self, outcome: str) -> set[str]:
        return {
            case["id"].partition("[")[0]
            for case in self.report.get("cases", [])
            if case["outcome"] == outcome
        }


@pytest.fixture(scope="session")
def plugin_path(tmp_path_factory):
    """An installed distribution, as far as importlib.metadata can tell."""
    site = tmp_path_factory.mktemp("site")
    info = site / "wrong-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[nereus]\nwrong = wrong_adapters\n")
    return os.pathsep.join([str(site), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="session")
def held(plugin_path, tmp_path_factory):
    """Hold a wrong adapter to the suite; runs are kept, two at a time."""
    if "nereus" not in {p.name for p in metadata.entry_points(group="pytest11")}:
        pytest.skip("nereus is not installed here: its pytest plugin cannot be found")
    pool, runs = ThreadPoolExecutor(2), dict[tuple[str, str], "Future[Run]"]()

    def run(name: str, keyword: str) -> Run:
        folder = tmp_path_factory.mktemp(name)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--tb=short"),
                *("--pyargs", "nereus_conformance", f"--adapter=wrong_{name}", "-k", keyword),
                f"--conformance-report={folder / 'report.json'}",
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": plugin_path},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        path = folder / "report.json"
        report = json.loads(path.read_text()) if path.exists() else {}
        return Run(done.returncode, done.stdout + done.stderr, report)

    def start(name: str, keyword: str) -> "Future[Run]":
        key = (name, keyword)
        if key not in runs:
            runs[key] = pool.submit(run, name, keyword)
        return runs[key]

    for name in CAUGHT:  # all at once, so that both workers always have something to do
        start(name, QUICK)
    yield lambda name, keyword=QUICK: start(name, keyword).result(timeout=600)
    pool.shutdown(cancel_futures=True)


CAUGHT = {
    "i1": {
        "test_split_uses_exactly_the_parent_devices",
        "test_split_keeps_parameters",
        "test_merge_undoes_split",
        "test_split_undoes_merge",
        "test_two_stages_transition_at_once",
        "test_replayed_op_returns_its_receipt",
        "test_planned_transition_reaches_the_plan",
        "test_there_and_back_restores_state",
    },
    "i2": {
        "test_merge_keeps_optimizer_state",
        "test_there_and_back_restores_state",
        "test_loss_follows_the_fixed_layout",
        "test_gradients_match_the_fixed_layout",
    },
    "i3": {"test_units_of_a_stage_share_one_layout"},
    "i4": {"test_merge_of_diverged_units_is_refused"},
    "i5": {"test_replayed_op_returns_its_receipt"},
    "i6": {
        "test_disjoint_primitives_commute",
        "test_two_stages_transition_at_once",
        "test_colocated_stages_hand_over_devices",
        "test_planned_transition_reaches_the_plan",
        "test_there_and_back_restores_state",
    },
    "i7": {"test_memory_is_free_when_destroy_returns", "test_colocated_stages_hand_over_devices"},
    "i8": {"test_primitive_outside_a_boundary_is_refused", "test_only_named_stages_are_held"},
    "i9": {"test_reads_do_not_delay_a_step"},
    "i10": {
        "test_no_sample_is_repeated_or_skipped",
        "test_loss_follows_the_fixed_layout",
        "test_gradients_match_the_fixed_layout",
        "test_split_keeps_rng_and_step_count",
        "test_relinking_again_changes_nothing",
    },
    "i11": {"test_extended_rollout_serves_the_source_version"},
    "i12": {"test_job_steps_after_an_error_inside_a_boundary"},
    "i13": {
        "test_units_change_between_commit_and_release",
        "test_abort_before_commit_changes_nothing",
    },
    "mute": {
        "test_phases_are_told_in_order",
        "test_units_change_between_commit_and_release",
        "test_abort_before_commit_changes_nothing",
        "test_error_after_commit_keeps_the_receipt",
    },
    "trusting": {"test_corrupted_state_is_caught_before_commit"},
    "forgetful": {"test_error_after_commit_keeps_the_receipt"},
}


@pytest.mark.parametrize("name", CAUGHT)
def test_a_wrong_adapter_fails_the_cases_of_its_invariant_and_no_other(held, name):
    run = held(name)

    assert run.named("failed") == CAUGHT[name], run.output[-6000:]
    assert run.code == 1


def test_a_failure_says_invariant_tensor_remedy_and_how_to_repeat_it(held):
    output = held("i2").output

    assert "I2 state: merge actor/train#0 + actor/train#1" in output or (
        "I2 state: merge actor/train#0, actor/train#1" in output
    )
    assert "changed exp_avg of model." in output
    assert "If this fails, check that moments take the routes of their parameter." in output
    assert (
        "Again: pytest --pyargs nereus_conformance --adapter=wrong_i2 "
        "-k 'test_merge_keeps_optimizer_state' --seed=0"
    ) in output


def test_the_random_walk_finds_a_lost_child(held):
    assert held("i1", "random_walk").named("failed") == {"test_random_walk_agrees_with_the_model"}


def test_memory_that_is_never_freed_shows_when_the_job_goes_on(held):
    assert held("leaking", "memory_is_free").named("failed") == {
        "test_memory_is_free_when_destroy_returns",
        "test_memory_is_free_when_the_job_goes_on",
    }


def test_what_is_unsupported_is_skipped_and_its_refusal_is_tested(held):
    run = held("refuses", "test_split or test_refusals")

    assert run.code == 0, run.output[-4000:]
    assert "test_split_keeps_parameters" in run.named("skipped")
    assert run.named("passed") == {"test_undeclared_power_is_refused"}
    assert run.report["primitives"]["split"] == dict.fromkeys(
        ("generate", "infer", "train"), "refused"
    )


def test_what_needs_a_newer_backend_counts_as_unsupported(held):
    run = held("too_early", "test_split or test_refusals")

    assert run.code == 0, run.output[-4000:]
    assert "test_split_keeps_parameters" in run.named("skipped")
    assert run.report["primitives"]["split"]["train"] == "refused"


@pytest.mark.parametrize(
    ("name", "failed", "said"),
    [
        ("seamed", set(), ""),
        ("seam_gone", {"test_every_seam_resolves", "test_seam_signatures_match"}, "has no Gone"),
        ("seam_changed", {"test_seam_signatures_match"}, "(self, plugin, name)"),
        (
            "seam_undeclared",
            {"test_no_framework_name_is_used_that_is_not_a_seam"},
            "used and not declared as seams: pluggy:Result",
        ),
    ],
)
def test_seams_are_read_from_the_source_of_the_framework(held, name, failed, said):
    run = held(name, "test_seams")

    assert run.named("failed") == failed, run.output[-4000:]
    assert said in run.output


def test_an_unsupported_primitive_that_works_is_caught(held):
    run = held("false_refusal", "test_refusals")

    assert run.named("failed") == {"test_undeclared_power_is_refused"}
    assert "was accepted, but should raise Unsupported" in run.output


def test_a_primitive_declared_full_that_is_refused_is_caught(held):
    assert "test_split_keeps_parameters" in held("vain", "test_split").named("failed")


def test_not_yet_is_expected_to_fail(held):
    run = held("cannot_yet", "test_split_keeps_parameters")

    assert run.code == 0, run.output[-4000:]
    assert run.named("expected") == {"test_split_keeps_parameters"}


def test_a_not_yet_that_passes_fails_and_says_to_declare_it(held):
    run = held("modest", "test_split_keeps_parameters")

    assert run.code == 1
    assert run.named("failed") == {"test_split_keeps_parameters"}
    assert "declare it full()" in run.output


def test_a_missing_entry_fails_by_name(held):
    run = held("silent", "test_declaration")

    assert run.named("failed") == {"test_every_capability_is_declared"}
    assert "split/generate, split/infer, rng_state" in run.output


def test_a_known_failure_is_expected(held):
    run = held("excused", "test_receipts")

    assert run.code == 0, run.output[-4000:]
    assert run.named("expected") == {"test_replayed_op_returns_its_receipt"}


def test_a_known_failure_is_expected_to_fail_as_it_is_said_to(held):
    run = held("rightly_excused", "test_replayed_op_returns_its_receipt")

    assert run.code == 0, run.output[-4000:]
    assert run.named("expected") == {"test_replayed_op_returns_its_receipt"}


def test_a_known_failure_that_fails_in_another_way_fails(held):
    run = held("wrongly_excused", "test_replayed_op_returns_its_receipt")

    assert run.code == 1
    assert "I5 once" in run.output


def test_a_known_failure_that_passes_fails(held):
    run = held("over_excused", "test_replayed_op_returns_its_receipt")

    assert run.code == 1
    assert "known failure: not so, #2" in run.output


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("misspelt", "names 'test_replayed_op_returns_a_receipt', which is no case"),
        ("unexplained", "gives no reason for 'test_elapsed_is_wall_seconds'"),
        ("absent", "no adapter 'wrong_absent'; installed:"),
    ],
)
def test_an_option_or_declaration_that_means_nothing_ends_the_run(held, name, said):
    run = held(name)

    assert run.code == 4
    assert said in run.output

"""Suite: which adapter is held to which cases, and what its declaration makes of each.

=============  =====================================================================
declared       a case that needs it
=============  =====================================================================
full, since    must pass
unsupported    is skipped, and `test_undeclared_power_is_refused` tests the refusal
not_yet        is a strict xfail: a pass fails the run
(absent)       runs; `test_every_capability_is_declared` fails
=============  =====================================================================
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

import pytest

from nereus_conformance import hookspecs
from nereus_conformance.report import Report
from nereus_core.backend_status import BackendStatus
from nereus_core.capabilities import Capabilities, Feature, Level, Support
from nereus_core.declaration import AdapterDeclaration, KnownFailure
from nereus_core.errors import DevicesMissing, NereusError
from nereus_core.harness import Harness, Tier
from nereus_core.layout import Layout
from nereus_core.loading import Plugin
from nereus_core.primitives import Kind
from nereus_core.registry import Registry
from nereus_core.workload import Stage

_FOLDER = Path(__file__).parent
Need = tuple[Kind, Stage] | Feature


class Suite:
    """One run of the suite against one adapter in one tier; a pytest plugin."""

    def __init__(
        self,
        registry: Registry,
        declaration: AdapterDeclaration,
        plugin: Plugin,
        status: BackendStatus,
        tier: Tier,
        seed: int,
        report: Report,
        options: Mapping[str, str],
    ) -> None:
        self.registry, self.declaration, self.plugin = registry, declaration, plugin
        self.status, self.tier, self.seed, self.report = status, tier, seed, report
        self.options = options

    @classmethod
    def of(cls, config: pytest.Config) -> Suite:
        """Read the options; raises UsageError for an adapter that is not there."""
        name, tier = config.getoption("--adapter"), Tier(config.getoption("--tier"))
        seed = config.getoption("--seed")
        registry = Registry.load()
        registry.add_hookspecs(hookspecs)
        try:
            declaration = registry.declaration(name)
        except NereusError as error:
            raise pytest.UsageError(str(error)) from error
        installed = next(i for i in registry.adapters() if i.declaration.name == name)
        if declaration.tiers and tier not in declaration.tiers:
            raise pytest.UsageError(
                f"adapter {name!r} has no harness for tier {tier}; "
                f"it declares {', '.join(declaration.tiers)}"
            )
        path = config.getoption("--conformance-report")
        report = Report(
            declaration,
            backend_version=installed.status.installed,
            origin=f"{installed.plugin.distribution} {installed.plugin.version}",
            tier=tier,
            seed=seed,
            path=Path(path) if path else None,
        )
        options = dict(_pair(text) for text in config.getoption("--harness"))
        return cls(
            registry, declaration, installed.plugin, installed.status, tier, seed, report, options
        )

    @property
    def capabilities(self) -> Capabilities:
        """The adapter's table."""
        return self.declaration.capabilities

    def support(self, need: Need) -> Support | None:
        """Return the entry of the table for a need."""
        if isinstance(need, Feature):
            return self.capabilities.features.get(need)
        return self.capabilities.of(*need)

    def holds(self, need: Need) -> bool:
        """Whether the adapter declares that it can do this with the backend installed."""
        support = self.support(need)
        return support is not None and support.at(self.status.installed)

    def require_layout(self, layout: Layout) -> None:
        """Skip a case that wants pipeline stages of an adapter that has none."""
        support = self.support(Feature.PIPELINE_STAGES)
        if layout.pp > 1 and support is not None and not self.holds(Feature.PIPELINE_STAGES):
            pytest.skip(f"{layout}: PIPELINE_STAGES unsupported: {support.reason}")

    def refused(self) -> Iterator[tuple[Need, Support]]:
        """List what the adapter declares it cannot do with the backend installed."""
        needs: list[Need] = [(kind, stage) for kind in Kind for stage in Stage]
        for need in [*needs, *Feature]:
            support = self.support(need)
            if support is None or support.level is Level.NOT_YET:
                continue
            if not support.at(self.status.installed):
                yield need, support

    def harness(self) -> Harness:
        """Ask the adapter's plugin for its harness; skips where it declares none."""
        name = self.declaration.name
        if not self.declaration.tiers:
            pytest.skip(f"adapter {name!r} declares no tier: nothing can be launched")
        try:
            harness: Harness | None = self.registry.ask(
                name, "nereus_conformance_harness", tier=self.tier, options=self.options
            )
        except DevicesMissing as missing:
            pytest.skip(f"tier {self.tier} of {name} {missing}")
        if harness is None:
            pytest.fail(
                f"adapter {name!r} declares tier {self.tier}, but its "
                "nereus_conformance_harness returned None for it.",
                pytrace=False,
            )
        return harness

    # --- Hooks of pytest ------------------------------------------------------------------------

    def pytest_report_header(self) -> str:
        """Say what is held to what."""
        return self.report.header()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a case once per stage, and the refusals once per declared refusal."""
        if not _is_case(metafunc.module.__file__):
            return
        if "stage" in metafunc.fixturenames:
            metafunc.parametrize("stage", list(Stage), ids=[s.value for s in Stage])
        if "refusal" in metafunc.fixturenames:
            needs = [need for need, _ in self.refused()]
            metafunc.parametrize("refusal", needs, ids=[name_of(n) for n in needs])

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Let the declaration decide what is expected of each case."""
        cases = [item for item in items if _is_case(str(item.path))]
        self._check_known_failures(cases)
        for item in cases:
            needs = tuple(_needs(item))
            self.report.planned(item.nodeid, _case_name(item), needs)
            for need in needs:
                self._expect(item, need)
            for known in {item.name, _case_name(item)} & set(self.declaration.known_failures):
                item.add_marker(_known(self.declaration.known_failures[known]))

    def _expect(self, item: pytest.Item, need: Need) -> None:
        support, name = self.support(need), name_of(need)
        if support is None:
            return
        if support.level is Level.NOT_YET:
            reason = (
                f"{name} not yet: {support.reason} ({support.tracking}); "
                "a case that passes means: declare it full()"
            )
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
        elif not support.at(self.status.installed):
            item.add_marker(pytest.mark.skip(reason=f"{name} unsupported: {support.reason}"))

    def _check_known_failures(self, cases: list[pytest.Item]) -> None:
        names = case_names()
        collected = {item.name for item in cases}
        modules_of = {_case_name(item) for item in cases}
        for known, reason in self.declaration.known_failures.items():
            base = known.partition("[")[0]
            # A parameter can only be judged when its case was collected in this run.
            wrong_parameter = "[" in known and base in modules_of and known not in collected
            if base not in names or wrong_parameter:
                raise pytest.UsageError(
                    f"known_failures of {self.declaration.name!r} names {known!r}, "
                    "which is no case of this suite"
                )
            if not (reason.reason if isinstance(reason, KnownFailure) else reason).strip():
                raise pytest.UsageError(
                    f"known_failures of {self.declaration.name!r} gives no reason for {known!r}"
                )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add to a failure what to check and how to run it again; keep every outcome."""
        report = yield
        if _is_case(str(item.path)):
            if report.failed:
                report.sections.append(("nereus conformance", self._advice(item)))
            self.report.seen(report)
        return report

    def _advice(self, item: pytest.Item) -> str:
        doc = " ".join((getattr(item, "obj", None).__doc__ or "").split())
        check = re.search(r"If this fails, check.*", doc)
        tier = "" if self.tier is Tier.CONTRACT else f" --tier={self.tier}"
        again = (
            f"Again: pytest --pyargs nereus_conformance --adapter={self.declaration.name}{tier} "
            f"-k '{_case_name(item)}' --seed={self.seed}"
        )
        return "\n".join([check[0], again] if check else [again])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table: what held, by primitive and stage."""
        for line in self.report.table(self):
            terminalreporter.write_line(line)

    def pytest_sessionfinish(self) -> None:
        """Write the JSON report."""
        self.report.write(self)


def _known(failure: str | KnownFailure) -> pytest.MarkDecorator:
    """Expect a case to fail, as it is said to where that is said."""
    if isinstance(failure, str):
        return pytest.mark.xfail(reason=f"known failure: {failure}", strict=True)
    says = pytest.RaisesExc(match=failure.says)
    return pytest.mark.xfail(reason=f"known failure: {failure.reason}", raises=says, strict=True)


def name_of(need: Need) -> str:
    """Write a need as in the identifiers of refusals: ``split-train``, ``RNG_STATE``."""
    return need.name if isinstance(need, Feature) else f"{need[0]}-{need[1]}"


def case_names() -> frozenset[str]:
    """Read the names of all cases from the source of the suite."""
    return frozenset(
        name
        for path in sorted(_FOLDER.glob("test_*.py"))
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    )


def _is_case(path: str | None) -> bool:
    return path is not None and _FOLDER in Path(path).parents


def _case_name(item: pytest.Item) -> str:
    return str(getattr(item, "originalname", item.name))


def _needs(item: pytest.Item) -> Iterator[Need]:
    params: Mapping[str, object] = getattr(getattr(item, "callspec", None), "params", {})
    for marker in item.iter_markers("needs"):
        stage = params.get("stage", marker.kwargs.get("stage", Stage.TRAIN))
        for need in marker.args:
            yield need if isinstance(need, Feature) else (need, Stage(str(stage)))


def _pair(text: str) -> tuple[str, str]:
    """Take ``KEY=VALUE`` apart; raises UsageError for anything else."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise pytest.UsageError(f"--harness {text!r}: expected KEY=VALUE, e.g. pool=ray")
    return key, value

"""The hooks of a rollout engine's adapter: what engines declare alike, and what is their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import TYPE_CHECKING

from nereus_core.capabilities import Capabilities, Feature, full, unsupported
from nereus_core.declaration import AdapterDeclaration, Seam
from nereus_core.errors import WrongHandle
from nereus_core.hookspecs import hookimpl
from nereus_core.workload import Stage

if TYPE_CHECKING:
    from nereus_adapters.rollout.adapter import RolloutAdapter
    from nereus_adapters.rollout.harness import RolloutHarness
    from nereus_core.config import NereusConfig


def capabilities(title: str) -> Capabilities:
    """Return what an engine of this name can do: everything, with the stage that generates."""
    table = {
        Stage.GENERATE: full(),
        Stage.TRAIN: unsupported(f"{title} generates; training is another adapter's, or the job's"),
        Stage.INFER: unsupported(f"{title} generates; forward passes are another adapter's"),
    }
    return Capabilities(
        split=table,
        merge=table,
        extend=table,
        destroy=table,
        features={
            **{feature: full() for feature in Feature},
            Feature.FINGERPRINT: unsupported(
                "engines hold weights in their kernels' form; digests are checked as weights arrive"
            ),
            Feature.EFFICIENCY_PROBE: unsupported(
                "tokens per second are measured, classes are not"
            ),
        },
    )


@dataclass(frozen=True, slots=True)
class EngineHooks:
    """Hooks of one engine's adapter. Nothing is imported before a hook needs it."""

    name: str
    """Of the adapter."""
    title: str
    """Of the engine, as its makers write it."""
    summary: str
    distributions: tuple[str, ...]
    """Names that the engine is distributed by; the first is asked for where none is installed."""
    versions: str
    """That the adapter is for, as PEP 440 has them."""
    seams: tuple[Seam, ...]
    harness: str
    """Module with `new_harness`."""

    @property
    def capabilities(self) -> Capabilities:
        """What the adapter can do."""
        return capabilities(self.title)

    @property
    def distribution(self) -> str:
        """The name that the engine has here: CPU builds may have one of their own."""
        for name in self.distributions:
            try:
                metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
            return name
        return self.distributions[0]

    @hookimpl
    def nereus_declare_adapter(self) -> AdapterDeclaration:
        """Declare the engine without importing it."""
        requirement = f"{self.distribution}{self.versions}"
        return AdapterDeclaration(
            self.name,
            self.summary,
            self.capabilities,
            requirement=requirement,
            install=f"pip install '{requirement}'",
            seams=self.seams,
            tiers=("real",),
        )

    @hookimpl
    def nereus_create_adapter(
        self, name: str, handle: object, config: NereusConfig
    ) -> RolloutAdapter | None:
        """Attach to the generate stage of a running job."""
        if name != self.name:
            return None
        from nereus_adapters.rollout.adapter import RolloutAdapter
        from nereus_adapters.rollout.job import RolloutJob

        if not isinstance(handle, RolloutJob):
            raise WrongHandle(self.name, handle, "a nereus_adapters.rollout.job.RolloutJob")
        version = metadata.version(self.distribution)
        return RolloutAdapter(self.name, self.capabilities, handle, version)

    @hookimpl(optionalhook=True)
    def nereus_conformance_harness(
        self, name: str, tier: str, options: Mapping[str, str]
    ) -> RolloutHarness | None:
        """Return the harness of the real tier: the engine on a CPU. Options are `new_harness`'s."""
        if name != self.name or tier != "real":
            return None
        made: RolloutHarness = import_module(self.harness).new_harness(**options)
        return made

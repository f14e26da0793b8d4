"""A running job under a controller."""

import time
from contextlib import closing
from dataclasses import replace

import pytest

from nereus_core.attach import attached
from nereus_core.capabilities import Capabilities, Feature, unsupported
from nereus_core.config import NereusConfig
from nereus_core.errors import ConfigError
from nereus_core.events import EventLog
from nereus_core.registry import Registry


def test_what_an_adapter_can_do_with_this_job_counts_before_what_it_declares(tmp_path, monkeypatch):
    """Declared of all jobs is what holds of all; a job may have less, or more."""
    keys = {
        "adapter": "sim",
        "run_dir": str(tmp_path),
        "constraints": {"pin": {"actor/train": "tp1pp2"}},
    }
    config, registry = NereusConfig.of(keys), Registry.load()
    create, everything = registry.create, Capabilities.everything()
    features = {**everything.features, Feature.PIPELINE_STAGES: unsupported("of this job")}

    def of_this_job(*asked):
        adapter = create(*asked)
        adapter.capabilities = replace(everything, features=features)
        return adapter

    with (
        closing(registry.launch("sim", config)) as launched,
        closing(EventLog(tmp_path / "events.jsonl", time.monotonic)) as log,
    ):
        with attached(registry, launched.handle, config, log, time.monotonic):
            pass
        monkeypatch.setattr(registry, "create", of_this_job)
        with (
            pytest.raises(ConfigError, match="actor/train is pinned to a layout with pp > 1"),
            attached(registry, launched.handle, config, log, time.monotonic),
        ):
            pass

"""Which pool the seats of a job come from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from nereus_adapters.torch.config import BackendSection
from nereus_adapters.torch.fleet import Pool
from nereus_adapters.torch.pool import LocalPool
from nereus_core.cluster import Cluster
from nereus_core.errors import BackendMissing, ConfigError, NereusError

_WORD = "seats"
"""File in a run's folder that names the private folder of its seats."""


def open_pool(backend: BackendSection, cluster: Cluster) -> Pool:
    """Open the pool that ``[backend]`` names, for the devices of a cluster.

    Raises:
        BackendMissing: ``pool = "ray"`` without Ray.
        ConfigError, DevicesMissing, WaitTimeout: as the pools do.
    """
    if backend.pool == "local":
        return LocalPool(
            backend.device,
            threads=backend.threads,
            start_s=backend.start_s,
            grace_s=backend.grace_s,
        )
    try:
        from nereus_adapters.torch.ray_pool.pool import RayPool
    except ModuleNotFoundError as error:
        raise BackendMissing("torch", "ray>=2.41", "pip install 'nereus[torch,ray]'") from error
    return RayPool(
        backend.device,
        Counter(device.node for device in cluster.devices),
        address=backend.address,
        resources=backend.resources or None,
        threads=backend.threads,
        port=backend.port,
        start_s=backend.start_s,
    )


def leave_word(pool: Pool, run_dir: Path) -> None:
    """Say in a run's folder where its seats are, for a driver that takes them over.

    Seats of the Ray pool end with their driver, as Ray has it: there is nothing to say of them.
    """
    if isinstance(pool, LocalPool):
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        word = run_dir / _WORD
        word.touch(mode=0o600)
        word.write_text(str(pool.folder.path), encoding="utf-8")


def left_pool(run_dir: Path, backend: BackendSection) -> Pool:
    """Take over the seats of a run whose driver died; raises ConfigError when there are none."""
    key = "backend.reattach"
    try:
        pool = LocalPool.attach(
            Path((run_dir / _WORD).read_text(encoding="utf-8")),
            backend.device,
            threads=backend.threads,
            start_s=backend.start_s,
            grace_s=backend.grace_s,
        )
    except (OSError, NereusError) as error:
        raise ConfigError(key, f"{run_dir} has left no seats: {error}") from error
    if not pool.alive:
        pool.close()
        raise ConfigError(key, f"the seats of {run_dir} have ended; go on with --resume")
    return pool

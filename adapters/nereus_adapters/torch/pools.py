"""Which pool the seats of a job come from."""

from __future__ import annotations

from collections import Counter

from nereus_adapters.torch.config import BackendSection
from nereus_adapters.torch.fleet import Pool
from nereus_adapters.torch.pool import LocalPool
from nereus_core.cluster import Cluster
from nereus_core.errors import BackendMissing


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

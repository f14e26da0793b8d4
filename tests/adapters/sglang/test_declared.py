from importlib.metadata import version

import pytest
from listed_adapters import require_listed

from nereus_adapters.rollout.sglang.seams import SEAMS
from nereus_core.seams import check_seam

pytestmark = pytest.mark.real


@pytest.mark.parametrize("seam", SEAMS, ids=str)
def test_the_installed_sglang_has_what_the_adapter_stands_on(seam):
    check_seam(seam)


def test_it_is_listed_with_its_version_and_what_it_can():
    require_listed("sglang", version("sglang"))

import sys

import pytest

from nereus_core.declaration import Seam
from nereus_core.errors import SeamBroken
from nereus_core.seams import check_seam, source_of

FRAMEWORK = {
    "__init__.py": "raise RuntimeError('imported')\nfrom .trainer import Trainer as T\n",
    "trainer.py": """
try:
    import fast
except ImportError:
    def helper(a, *, key=None): ...

REGISTRY: dict = {}

class Base:
    def inherited(self, batch): ...

class Trainer(Base):
    size = 3
    def __init__(self, config, tokenizer):
        self.config, self.seed = config, 1
        self.tokenizer: object = tokenizer
        config.other = 1
    async def step(self, rollout, /, global_step, *, extra=None): ...

def decorated(cls):
    class Remote(cls):
        def call(self, function, *args): ...
    return Remote
""",
    "bare/deep/tool.py": "def hold(hand): ...\n",
    "inner/__init__.py": "from ..trainer import helper\nfrom .loops import *\n",
}


@pytest.fixture(autouse=True)
def framework(tmp_path, monkeypatch):
    for name, text in FRAMEWORK.items():
        path = tmp_path / "seamless" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    assert not [m for m in sys.modules if m.startswith("seamless")]


@pytest.mark.parametrize(
    ("module", "qualname", "parameters"),
    [
        ("seamless.trainer", "Trainer", None),
        ("seamless.trainer", "Trainer", ("config",)),
        ("seamless.trainer", "Trainer.step", ("self", "rollout", "global_step")),
        ("seamless.trainer", "Trainer.step", ("rollout", "extra")),
        ("seamless.trainer", "Trainer.size", None),
        ("seamless.trainer", "Trainer.inherited", ("batch",)),
        ("seamless.trainer", "Trainer.seed", None),
        ("seamless.trainer", "Trainer.tokenizer", None),
        ("seamless.trainer", "decorated.Remote.call", ("self", "function")),
        ("seamless.trainer", "helper", ("a", "key")),
        ("seamless.trainer", "REGISTRY", None),
        ("seamless", "T.step", ("global_step",)),
        ("seamless.inner", "helper", ("a",)),
        ("seamless.bare.deep.tool", "hold", ("hand",)),
    ],
)
def test_a_seam_that_holds(module, qualname, parameters):
    check_seam(Seam(module, qualname, parameters))


@pytest.mark.parametrize(
    ("module", "qualname", "parameters", "found"),
    [
        ("seamless.trainer", "Trainr", None, "the module has no Trainr"),
        ("seamless.trainer", "Trainer.stop", None, "class Trainer has no stop"),
        ("seamless.trainer", "Trainer.step", ("batch",),
         r"found Trainer.step\(self, rollout, global_step, extra\)"),
        ("seamless.trainer", "Trainer.step", ("global_step", "rollout"), "found Trainer.step"),
        ("seamless.trainer", "Trainer.other", None, "class Trainer has no other"),
        ("seamless.trainer", "helper.x", None, "function helper has no x"),
        ("seamless.trainer", "decorated.Remote.run", None, "class Remote has no run"),
        ("seamless.trainer", "REGISTRY.x", None, "REGISTRY is neither a class nor a function"),
        ("seamless.trainer", "REGISTRY", ("a",), "REGISTRY is not a function"),
        ("seamless.trainer", "Base", ("a",), "class Base has no __init__ of its own"),
        ("seamless.absent", "x", None, "no source of module seamless.absent is installed"),
        ("not_installed_at_all.x", "x", None, "no source of module not_installed_at_all.x"),
    ],
)  # fmt: skip
def test_a_seam_that_does_not_hold_says_what_is_there(module, qualname, parameters, found):
    with pytest.raises(SeamBroken, match=found):
        check_seam(Seam(module, qualname, parameters))


def test_compiled_modules_have_no_source():
    assert source_of("math") is None
    assert source_of("json.decoder").name == "decoder.py"

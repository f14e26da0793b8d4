"""The same job, tiny and on CPU, so that Nereus can be watched without a GPU.

Run it in the environment of ``tox -e real-verl``:
``tox exec -e real-verl -- python examples/verl_grpo/on_cpu.py [overrides]``.
"""

import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from verl_cpu.assets import make_assets
from verl_cpu.command import overrides, run_job

HERE = Path(__file__).resolve().parent
STEPS, JOB_S = 6, 600


def main() -> int:
    """Run the job and print what Nereus said; returns verl's exit code."""
    with tempfile.TemporaryDirectory(prefix="nereus-verl-") as folder:
        assets = make_assets(Path(folder) / "assets")
        arguments = overrides(assets, Path(folder), ray_devices=4, steps=STEPS, reference=True)
        switch = [
            "+nereus.enable=true",
            f"+nereus.config={HERE / 'nereus.toml'}",
            f"+nereus.run_dir={Path('runs/verl_grpo').resolve()}",
        ]
        growing = {"VERL_CPU_LENGTHS": "8,8,16,32"}
        ran = run_job(
            Path(folder), [*arguments, *switch, *sys.argv[1:]], timeout_s=JOB_S, env=growing
        )
    for line in ran.output.splitlines():
        if "[nereus]" in line:
            print(line[line.index("[nereus]") :])
    if ran.returncode:
        print(ran.output[-2000:])
    return ran.returncode


if __name__ == "__main__":
    raise SystemExit(main())

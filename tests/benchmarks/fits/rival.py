"""The PyPI package ``aiconfigurator`` predicting rows of serving_dense.csv, its defaults untouched.

Aggregated (continuous batching) estimates with the row's own system, backend, degrees, lengths,
batch and quantization; the package's newest kernel database of that backend. A model whose
configuration the package does not carry is asked for under a name with the same shapes, so that
nothing is downloaded. Needs the ``bench`` extra. The database is looked up once per system and
backend, as the package does it anew for every row.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from fits.serving_rows import ServingRow

SAME_SHAPES = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds the package expects for one row, or why it expects none."""

    ttft_s: float
    tpot_s: float
    refused: str


def available() -> str | None:
    """Say why the package cannot be asked, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import aiconfigurator.cli.api  # noqa: F401
    except ImportError as error:
        return f"{error}: pip install 'nereus[bench]'"
    return None


@cache
def _newest(system: str, backend: str) -> str | None:
    from aiconfigurator_core.sdk.perf_database import get_latest_database_version

    return get_latest_database_version(system=system, backend=backend)


def estimates(rows: Iterable[ServingRow]) -> list[Estimate]:
    """Ask for each row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from aiconfigurator.cli.api import cli_estimate
    logging.getLogger("aiconfigurator").setLevel(logging.CRITICAL)
    found = []
    for row in rows:
        try:
            with (
                warnings.catch_warnings(),
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                warnings.simplefilter("ignore")
                one = cli_estimate(
                    SAME_SHAPES.get(row.model, row.model),
                    row.system,
                    backend_name=row.backend,
                    backend_version=_newest(row.system, row.backend),
                    isl=row.isl,
                    osl=row.osl,
                    batch_size=row.batch,
                    tp_size=row.tp,
                    pp_size=row.pp,
                    gemm_quant_mode=row.quantization or None,
                )
            found.append(Estimate(one.ttft / 1e3, one.tpot / 1e3, ""))
        except Exception as error:  # a rival's own refusal, whatever its class, is a result here
            found.append(Estimate(float("nan"), float("nan"), str(error)[:120]))
    return found

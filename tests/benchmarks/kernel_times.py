"""Kernel curves against kernels measured by others, out of sample.

Half of each table, drawn with a seed, is fitted; the other half is predicted. Classes are named
system.class; precisions other than bfloat16 are information. Products of fewer than 2 GFLOP mostly
time launches and caches, so the larger ones are shown beside all. Needs the ``bench`` extra.

    python tests/benchmarks/kernel_times.py [--data DIR] [--json | --priors]

``--priors`` prints the parameters fitted to all rows as ``nereus_core/cost/kernels/measured.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
try:
    from fits import kernel_tables as tables
    from fits.curves import Fitted, fit_attention, fit_gemm, fit_message
except ModuleNotFoundError as error:
    sys.exit(f"{error}: pip install 'nereus[bench]'")
from fits.score import Score

from nereus_core.cost.kernels import Collective, DecodeCurve, PrefillCurve

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SEED = 20261129
LARGE_PRODUCT = 1e9
"""m n k of a product of 2 GFLOP."""
CONFIDENCE = 0.9


@dataclass(frozen=True, slots=True)
class Case:
    """One table, how to fit it, and under which key its curve is shipped ('' for none)."""

    name: str
    table: tables.Table
    fit: Callable[[tables.Table], Fitted]
    shipped: str = ""


def cases(data: Path) -> Iterator[Case]:
    """List every table there is."""
    for system, spec in tables.SPECS.items():
        for precision, table in tables.gemms(data, system):
            each = tables.ELEMENT_BYTES[precision]
            fast = replace(spec, peak_flops_per_s=spec.peak_flops_per_s * 2 / each)
            key = f"GEMMS {spec.name}" if precision == "bfloat16" else ""

            def gemm(t: tables.Table, fast: Any = fast, each: float = each) -> Fitted:
                return fit_gemm(t, fast, each)

            yield Case(f"{system}.gemm_{precision}", table, gemm, key)
        for phase, kind, section in (
            ("context", PrefillCurve, "PREFILL"),
            ("generation", DecodeCurve, "DECODE"),
        ):
            found = tables.attention(data, system, phase)
            if found is not None:
                yield Case(
                    f"{system}.{found.name}",
                    found,
                    lambda t, kind=kind, spec=spec: fit_attention(kind, t, spec),
                    f"{section} {spec.name}",
                )
        link = tables.LINKS[system]
        for what, table in tables.nccl(data, system):
            yield Case(
                f"{system}.{what}_intra",
                table,
                lambda t, what=what, link=link: fit_message(t, link, what),
                f"MESSAGES {what} {link.name}",
            )
        custom = tables.custom_all_reduce(data, system)
        if custom is not None:
            yield Case(
                f"{system}.custom_all_reduce_intra",
                custom,
                lambda t, link=link: fit_message(t, link, Collective.ALL_REDUCE),
            )
    for system, op, what in (
        ("a100_dgx", "all_reduce", Collective.ALL_REDUCE),
        ("h100_dgx", "all_reduce", Collective.ALL_REDUCE),
        ("a100_dgx", "send_recv", Collective.P2P),
    ):
        for place, link, table in tables.vidur(data, system, op):
            known = what is Collective.ALL_REDUCE and place != "inter"
            only_sparse = what is Collective.P2P and place == "inter_sparse"
            key = "" if known else f"MESSAGES {what} {link.name}"
            yield Case(
                f"{system}.{what}_{place}",
                table,
                lambda t, what=what, link=link: fit_message(t, link, what),
                key if place != "inter_sparse" or only_sparse else "",
            )


def halves(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to fit and rows to predict."""
    order = np.random.default_rng(SEED).permutation(rows)
    return order[: rows // 2], order[rows // 2 :]


def measure(case: Case) -> dict[str, Score]:
    """Fit one half, predict the other; intervals from the fitted half's residual quantiles."""
    seen, unseen = halves(len(case.table))
    train, test = case.table.rows(seen), case.table.rows(unseen)
    fitted = case.fit(train)
    factor = np.exp(
        np.quantile(np.abs(np.log(fitted.predict(fitted.curve, train) / train.seconds)), CONFIDENCE)
    )
    predicted = fitted.predict(fitted.curve, test)

    def score(at: np.ndarray) -> Score:
        p, y = predicted[at], test.seconds[at]
        return Score.of(p, y, p / factor, p * factor)

    found = {case.name: score(np.ones(len(test), bool))}
    if "gemm" in case.name:
        m, n, k = (test.columns[c] for c in "mnk")
        found[f"{case.name}_large"] = score(m * n * k > LARGE_PRODUCT)
    return found


def priors(data: Path) -> str:
    """Python text of what the core ships: every curve fitted to all rows."""
    sections: dict[str, list[str]] = {n: [] for n in ("GEMMS", "PREFILL", "DECODE", "MESSAGES")}
    for case in cases(data):
        if not case.shipped:
            continue
        section, *key = case.shipped.split()
        curve = case.fit(case.table).curve
        values = ", ".join(
            f"{f.name}={_digits(getattr(curve, f.name))}" for f in fields(curve)[:-1]
        )
        named = f'(Collective.{Collective(key[0]).name}, "{key[1]}")' if len(key) > 1 else None
        folder = "vidur" if "network" in curve.source else "aiconfigurator"
        commit = "VIDUR" if folder == "vidur" else "AICONFIGURATOR"
        kind = type(curve).__name__
        label = named or f'"{key[0]}"'
        sections[section].append(
            f'    {label}: {kind}({values}, source=f"{{_{commit}}}: {curve.source}"),'
        )
    return "\n".join(f"{n} = {{\n" + "\n".join(rows) + "\n}" for n, rows in sections.items())


def _digits(value: float) -> str:
    return f"{0.0 if value < 1e-13 else float(f'{value:.4g}')!r}"


def main() -> None:
    """Print errors per class."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("NEREUS_DATA", DATA)))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--priors", action="store_true", help="print what the core ships")
    asked = parser.parse_args()
    if asked.priors:
        print(priors(asked.data))
        return
    found = {name: s.as_dict() for case in cases(asked.data) for name, s in measure(case).items()}
    if not found:
        sys.exit(f"no kernel tables under {asked.data}; set NEREUS_DATA")
    if asked.json:
        print(json.dumps(found, indent=2))
        return
    for name, s in found.items():
        print(f"{name:<40}" + "  ".join(f"{k} {v:7.2f}" for k, v in s.items()))


if __name__ == "__main__":
    main()

"""Figures of many kinds, summed up and printed in one way.

Problem. An average hides those who waited longest, and "0.0" for the time of answers that never came hides a failure.

Idea. Times are spread out in percentiles, rates are compared within a round, since a shared machine drifts, and what
was never observed is None: null in JSON, "-" in a table. Left out: confidence intervals; every repetition is printed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable


def spread(values: Iterable[float]) -> dict[str, float | None]:
    """Mean, percentiles (the least value that at least q % do not exceed) and maximum; None where there is no value."""
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys(("mean", "p50", "p95", "p99", "max"))
    at = {f"p{q}": ordered[math.ceil(q * len(ordered) / 100) - 1] for q in (50, 95, 99)}
    return {"mean": statistics.fmean(ordered), **at, "max": ordered[-1]}


def ratios(ours: list[float], theirs: list[float]) -> dict:
    """Ours over theirs in each round, and the median of it."""
    each = [round(a / b, 2) for a, b in zip(ours, theirs, strict=True)]
    return {"ratio": statistics.median(each), "ratios": each}


def cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return "  ".join(f"{key} {cell(part)}" for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(cell, value))
    if isinstance(value, float):
        return f"{value:,.1f}".removesuffix(".0") if abs(value) >= 100 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)


def lines(figures: dict) -> str:
    """A line for each figure."""
    width = max(map(len, figures))
    return "\n".join(f"{name:{width}}  {cell(value)}".rstrip() for name, value in figures.items())


def table(rows: list[dict]) -> str:
    """A line for each row, under the keys that all of them have."""
    cells = [list(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(text.rjust(n) for text, n in zip(line, widths, strict=True)) for line in cells)

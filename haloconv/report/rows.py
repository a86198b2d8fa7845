"""What was measured, as rows; and the rows as the records that result files hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from haloconv.layout import Layout
from haloconv.precision import PrecisionLabel

WholeDirection = Literal["forward", "step"]
"""What is measured of a whole model: the forward pass, or that and the backward pass."""
WHOLE_DIRECTIONS: tuple[WholeDirection, ...] = get_args(WholeDirection)

RowDirection = Literal["fprop", "dgrad", "wgrad", "bgrad", WholeDirection]
"""What a row can be of: a result of one layer, or a whole one."""

RowPrecision = Literal[PrecisionLabel, "mixed", "unknown"]
"""The precision of a row: ``"mixed"`` of a model whose layers have several, ``"unknown"`` of one that did not run."""

FULL_FP32 = 1e-5
"""An error of a result in fp32 below which no product of it was formed in TF32, whatever was allowed."""


_FLOATS = (float, float | None)


def computed_precision(label: RowPrecision, error: float | None) -> RowPrecision:
    """The precision that a side of a row computed in: where TF32 is allowed, its error tells if it was used.

    ``label`` is that of the row, ``error`` the side's norm error against float64.
    """
    return "fp32" if label == "tf32" and error is not None and error < FULL_FP32 else label


@dataclass(frozen=True)
class Row:
    """One comparison of haloconv with PyTorch at equal precision. Times are medians in ms, errors relative norms.

    ``direction`` is fprop, dgrad, wgrad, bgrad, forward (a whole model) or step (forward and backward). Both times are
    None if nothing was timed. ``flops`` and ``limit_ms`` are None where they are not defined. ``aten_best_ms`` is
    PyTorch's time in the better of both layouts. ``difference`` is the norm of haloconv minus PyTorch. ``complaint`` is
    None exactly if every check passed. ``kernel`` and ``config`` name what ran (families.base.Config), those of a step
    or a whole model joined by `` + ``; ``source`` is the hash of what decides its results (families.closure), None if
    that is not known. ``bytes`` are those of every tensor, once. ``count`` says how many layers of a model are like it.
    The peaks are bytes of device memory, of whole models only.
    """

    case: str
    direction: RowDirection
    precision: RowPrecision
    layout: Layout
    family: str
    reason: str
    error: float
    aten_error: float
    error_limit: float
    difference: float
    aten_ms: float | None
    haloconv_ms: float | None
    spread: float
    runs: int
    flops: int | None = None
    limit_ms: float | None = None
    aten_best_ms: float | None = None
    complaint: str | None = None
    config: str = ""
    bytes: int | None = None
    count: int = 1
    aten_peak_bytes: int | None = None
    haloconv_peak_bytes: int | None = None
    kernel: str = ""
    source: str | None = None

    @property
    def passed(self) -> bool:
        return self.complaint is None

    @property
    def ratio(self) -> float | None:
        """How many times faster than PyTorch; below 1 is a loss."""
        if self.aten_ms is None or self.haloconv_ms is None:
            return None
        return self.aten_ms / self.haloconv_ms if self.haloconv_ms else math.nan

    @property
    def known_ratio(self) -> float:
        """The ratio as a number that sorts and plots; NaN where there is none."""
        return math.nan if self.ratio is None else self.ratio

    @property
    def ratio_best(self) -> float | None:
        """How many times faster than PyTorch in its faster layout; None if only one layout was timed."""
        if self.aten_best_ms is None or self.haloconv_ms is None:
            return None
        return self.aten_best_ms / self.haloconv_ms if self.haloconv_ms else math.nan

    @property
    def aten_precision(self) -> RowPrecision:
        """The precision that PyTorch computed in, by its error: ``fp32`` where TF32 was allowed and not used."""
        return computed_precision(self.precision, self.aten_error)

    @property
    def roofline_fraction(self) -> float | None:
        """1 is the limit; ``share`` is its key in rows."""
        return self.limit_ms / self.haloconv_ms if self.limit_ms is not None and self.haloconv_ms else None

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of the dense definition."""
        return self.flops / self.haloconv_ms * 1e-9 if self.flops is not None and self.haloconv_ms else None

    @property
    def gbps(self) -> float | None:
        """GB/s if every tensor were read or written once."""
        return self.bytes / self.haloconv_ms * 1e-6 if self.bytes is not None and self.haloconv_ms else None

    @property
    def memory_ratio(self) -> float | None:
        """Our peak of device memory over PyTorch's."""
        if self.aten_peak_bytes is None or self.haloconv_peak_bytes is None:
            return None
        return self.haloconv_peak_bytes / self.aten_peak_bytes if self.aten_peak_bytes else math.nan

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Row:
        """The row of a record from a result file. Raises KeyError or TypeError if it is none.

        An error that was infinite or NaN is NaN; FLOP are known again from the rate and the time.
        """
        tflops, ours = record.get("tflops"), record["haloconv_ms"]
        known: dict[str, Any] = {name: record[name] for name in _SAME_IN_RECORDS if record.get(name) is not None}
        row = cls(
            **{name: record[name] for name in ("case", "direction", "precision", "layout", "family")},
            reason=record.get("reason") or "",
            error=_figure(record.get("error")),
            aten_error=_figure(record.get("aten_error")),
            error_limit=_figure(record.get("error_limit")),
            difference=_figure(record.get("difference")),
            aten_ms=record["aten_ms"],
            haloconv_ms=ours,
            spread=record.get("spread") or 0.0,
            runs=record.get("runs") or 0,
            flops=round(tflops * ours * 1e9) if tflops and ours else None,
            **known,
        )
        for name, kind in _KINDS.items():
            value = getattr(row, name)
            if not isinstance(float(value) if isinstance(value, int) and kind in _FLOATS else value, kind):
                raise TypeError(f"{name} is {value!r}")
        return row

    def record(self, environment: Mapping[str, str]) -> dict[str, object]:
        """The row as the record that result files hold, stamped with the environment."""
        return {
            "case": self.case,
            "direction": self.direction,
            "precision": self.precision,
            "layout": self.layout,
            "aten_ms": _number(self.aten_ms),
            "haloconv_ms": _number(self.haloconv_ms),
            "ratio": _number(self.ratio),
            "aten_best_ms": _number(self.aten_best_ms),
            "ratio_best": _number(self.ratio_best),
            "spread": _number(self.spread),
            "limit_ms": _number(self.limit_ms),
            "share": _number(self.roofline_fraction),
            "error": _number(self.error),
            "aten_error": _number(self.aten_error),
            "aten_precision": self.aten_precision,
            "family": self.family,
            "kernel": self.kernel,
            "config": self.config,
            "source": self.source,
            "gpu": environment.get("gpu", "none"),
            "torch": environment.get("torch", "none"),
            "cudnn": environment.get("cudnn", "none"),
            "cuda": environment.get("cuda_runtime", "none"),
            "commit": environment.get("commit", "none"),
            "date": environment.get("date", "none"),
            "reason": self.reason,
            "error_limit": _number(self.error_limit),
            "difference": _number(self.difference),
            "tflops": _number(self.tflops),
            "runs": self.runs,
            "passed": self.passed,
            "complaint": self.complaint,
            "bytes": self.bytes,
            "gbps": _number(self.gbps),
            "count": self.count,
            "aten_peak_bytes": self.aten_peak_bytes,
            "haloconv_peak_bytes": self.haloconv_peak_bytes,
            "memory_ratio": _number(self.memory_ratio),
        }


_SAME_IN_RECORDS = (
    "limit_ms", "aten_best_ms", "complaint", "config", "bytes", "count", "aten_peak_bytes", "haloconv_peak_bytes",
    "kernel", "source"
)  # fmt: skip


_KINDS = {name: str if get_origin(kind) is Literal else kind for name, kind in get_type_hints(Row).items()}


def _number(value: float | None) -> float | None:
    """The value as JSON can hold it: six significant digits, None for NaN and infinity."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def _figure(value: float | None) -> float:
    return math.nan if value is None else value

"""One step in numbers, as a line to read and as a line of JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from isp.settings.durations import format_duration

__all__ = ["Speed", "StepRecord", "speed"]


class Speed(NamedTuple):
    """The speed of a step."""

    tgs: float
    """Tokens a rank (GPU) a second."""
    tflops: float
    """Model TFLOP/s a rank."""
    mfu: float | None
    """`tflops` as a fraction of the device's peak; None where the peak is not known."""


def speed(
    *, tokens: int, flops: float, seconds: float, num_ranks: int, peak_tflops: float | None
) -> Speed:
    """The speed of `num_ranks` ranks that together did `tokens` and `flops` in `seconds`."""
    tflops = flops / seconds / num_ranks / 1e12
    mfu = None if peak_tflops is None else tflops / peak_tflops
    return Speed(tokens / seconds / num_ranks, tflops, mfu)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The numbers of a step under the keys of `metrics.jsonl`, which README.md here explains."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tgs: float
    tflops: float
    mfu: float | None
    step_ms: float
    comm_ms: float
    exposed_ms: float
    mem_gib: float
    data_ms: float | None = None
    forward_backward_ms: float | None = None
    reduce_ms: float | None = None
    optimizer_ms: float | None = None
    checkpoint_ms: float | None = None
    evaluation_ms: float | None = None
    val_loss: float | None = None
    loss_scale: float | None = None
    eta_seconds: float | None = None
    skipped: bool = False

    def line(self, num_steps: int) -> str:
        """The record for people, in a run of `num_steps`."""
        share = self.exposed_ms / self.step_ms
        fields = [
            f"step: {self.step}/{num_steps}",
            f"loss: {self.loss:.4f}",
            f"grad_norm: {self.grad_norm:.3f}",
            f"lr: {self.lr:.1e}",
            f"tgs: {self.tgs:,.0f}",
            f"tflops: {self.tflops:.2f}",
            *([] if self.mfu is None else [f"mfu: {self.mfu:.1%}"]),
            f"mem: {self.mem_gib:.2f}GiB",
            f"step_ms: {self.step_ms:.1f}",
            f"comm_ms: {self.comm_ms:.1f}",
            f"exposed_ms: {self.exposed_ms:.1f} ({share:.1%})",
            *([] if self.val_loss is None else [f"val_loss: {self.val_loss:.4f}"]),
            *([] if self.loss_scale is None else [f"loss_scale: {self.loss_scale:g}"]),
            *([] if self.eta_seconds is None else [f"eta: {format_duration(self.eta_seconds)}"]),
            *(["skipped"] if self.skipped else []),
        ]
        return "  ".join(fields)

    def to_json(self) -> str:
        """One line of JSON; a number that is not finite is null, as JSON has no word for it.

        `mfu` is null where it is not known; other fields that may be None are left out then.
        """
        values = dataclasses.asdict(self)
        for name in _optional():
            if values[name] is None:
                del values[name]
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                values[name] = None
        return json.dumps(values, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> StepRecord:
        """The record that `to_json` wrote, NaN where a number was not finite.

        Raises ValueError if `text` is anything else.
        """
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"not an object but {values!r}")
        _check_keys(set(values))
        return cls(**{name: _number(name, value) for name, value in values.items()})


def _optional() -> set[str]:
    """The fields that not every record has."""
    return {field.name for field in dataclasses.fields(StepRecord) if field.default is None}


def _check_keys(names: set[str]) -> None:
    known = {field.name for field in dataclasses.fields(StepRecord)}
    missing = known - names - _optional() - {"skipped"}
    for what, keys in (("unknown", names - known), ("missing", missing)):
        if keys:
            raise ValueError(f"{what}: {', '.join(sorted(keys))}")


def _number(name: str, value: Any) -> Any:
    if value is None and name not in ("step", "tokens", "skipped"):
        return None if name == "mfu" else math.nan
    kind: type | tuple[type, ...] = (int, float)
    if name in ("step", "tokens", "skipped"):
        kind = bool if name == "skipped" else int
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} is {value!r}")
    return value

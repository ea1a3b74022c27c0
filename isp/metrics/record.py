"""One step in numbers, as a line to read and as a line of JSON."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from isp.utils.files import first_fault
from isp.utils.text import format_duration

__all__ = ["StepRecord"]


_NULL_IS_NAN = BeforeValidator(lambda value: math.nan if value is None else value)
_Number = Annotated[float, _NULL_IS_NAN]
_Sometimes = Annotated[float | None, _NULL_IS_NAN]
"""None where it is left out."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The numbers of a step under the keys of `metrics.jsonl`, which README.md here explains."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True)

    step: int
    loss: _Number
    grad_norm: _Number
    lr: _Number
    tokens: int
    tgs: _Number
    tflops: _Number
    mfu: float | None
    step_ms: _Number
    comm_ms: _Number
    exposed_ms: _Number
    mem_gib: _Number
    padding: _Sometimes = None
    data_ms: _Sometimes = None
    forward_backward_ms: _Sometimes = None
    reduce_ms: _Sometimes = None
    optimizer_ms: _Sometimes = None
    checkpoint_ms: _Sometimes = None
    evaluation_ms: _Sometimes = None
    val_loss: _Sometimes = None
    val_losses: dict[str, _Number] | None = None
    lrs: dict[str, _Number] | None = None
    loss_scale: _Sometimes = None
    expert_load: _Sometimes = None
    unused_experts: int | None = None
    eta_seconds: _Sometimes = None
    skipped: bool = False

    def line(self, num_steps: int) -> str:
        """The record for people, in a run of `num_steps`."""
        share = self.exposed_ms / self.step_ms
        fields = [
            f"step: {self.step}/{num_steps}",
            f"loss: {self.loss:.4f}",
            f"grad_norm: {self.grad_norm:.3f}",
            f"lr: {self.lr:.1e}{_listed(self.lrs, '.1e')}",
            f"tgs: {self.tgs:,.0f}",
            *([] if self.padding is None else [f"padding: {self.padding:.1%}"]),
            f"tflops: {self.tflops:.2f}",
            *([] if self.mfu is None else [f"mfu: {self.mfu:.1%}"]),
            f"mem: {self.mem_gib:.2f}GiB",
            f"step_ms: {self.step_ms:.1f}",
            f"comm_ms: {self.comm_ms:.1f}",
            f"exposed_ms: {self.exposed_ms:.1f} ({share:.1%})",
            *(
                []
                if self.val_loss is None
                else [f"val_loss: {self.val_loss:.4f}{_listed(self.val_losses, '.4f')}"]
            ),
            *([] if self.loss_scale is None else [f"loss_scale: {self.loss_scale:g}"]),
            *([] if self.expert_load is None else [f"expert_load: {self.expert_load:.2f}"]),
            *([f"unused_experts: {self.unused_experts}"] if self.unused_experts else []),
            *([] if self.eta_seconds is None else [f"eta: {format_duration(self.eta_seconds)}"]),
            *(["skipped"] if self.skipped else []),
        ]
        return "  ".join(fields)

    def values(self) -> dict[str, float]:
        """Every metric but the step, without those that are not known."""
        values = dataclasses.asdict(self)
        for prefix, key in (("validation/loss", "val_losses"), ("lr", "lrs")):
            values |= {f"{prefix}/{name}": x for name, x in (values.pop(key) or {}).items()}
        return {key: float(x) for key, x in values.items() if x is not None and key != "step"}

    def to_json(self) -> str:
        """One line of JSON; a number that is not finite is null, as JSON has no word for it.

        `mfu` is null where it is not known; other fields that may be None are left out then.
        """
        absent = {f.name for f in dataclasses.fields(self) if f.default is None}
        absent = {name for name in absent if getattr(self, name) is None}
        return _adapter().dump_json(self, exclude=absent).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> StepRecord:
        """The record that `to_json` wrote, NaN where a number was not finite.

        Raises ValueError if `text` is anything else.
        """
        try:
            return _adapter().validate_json(text)
        except ValidationError as error:
            raise ValueError(first_fault(error)) from error


def _listed(numbers: dict[str, float] | None, form: str) -> str:
    """Those of several parts of a number, behind it."""
    parts = [f"{name} {x:{form}}" for name, x in (numbers or {}).items()]
    return f" ({', '.join(parts)})" if parts else ""


@functools.cache
def _adapter() -> TypeAdapter[StepRecord]:
    return TypeAdapter(StepRecord)

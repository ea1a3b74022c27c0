"""Metrics of a step as a log line and as JSON."""

import json
import math
from dataclasses import replace

import pytest

from isp.metrics import StepRecord

RECORD = StepRecord(
    step=10,
    loss=2.73911,
    grad_norm=0.6651,
    lr=3e-4,
    tokens=81920,
    tgs=4103.4,
    tflops=395.76,
    mfu=0.4,
    step_ms=158.0,
    comm_ms=41.0,
    exposed_ms=6.2,
    mem_gib=1.2345,
)


def test_the_line_has_the_documented_form() -> None:
    """Catches a changed field, order, width or unit: scripts read this line."""
    assert replace(RECORD, eta_seconds=5025.2).line(100) == (
        "step=10/100 loss=2.7391 grad_norm=0.665 lr=3.0e-04 tgs=4103 mfu=40.0% mem=1.23GiB"
        " step_ms=158 exposed=4% eta=1:23:45"
    )


def test_a_line_without_a_peak_or_transfers_leaves_them_out() -> None:
    """Catches an invented MFU on a device of unknown peak, and 0 / 0 on one rank."""
    line = replace(RECORD, mfu=None, comm_ms=0.0, exposed_ms=0.0, step_ms=5.83).line(10)
    assert "mfu" not in line
    assert " tflops=395.76 " in line
    assert line.endswith(" step_ms=5.8 exposed=0%")


def test_line_of_a_long_run_fits_the_terminal() -> None:
    """Catches a line that wraps, and metrics of the file that are added to it again."""
    record = replace(RECORD, step=123456, tgs=12345.0, mem_gib=71.234, step_ms=15834.5)
    record = replace(record, eta_seconds=45296.0, padding=0.1, loss_scale=65536.0, expert_load=2.0)
    line = replace(record, skipped=True, lrs={"muon": 2e-2}).line(200000)
    assert len(line) <= 120 + len(" skipped")
    assert line.startswith("step=123456 loss=2.7391 ")
    assert len(record.line(200000)) <= 120
    assert replace(RECORD, lrs={"muon": 2e-2}).values()["lr/muon"] == 2e-2


def test_lines_show_evaluations_and_skipped_steps() -> None:
    """Catches a validation loss or a skipped update that is not shown."""
    record = replace(RECORD, val_loss=2.5, skipped=True, grad_norm=math.inf)
    assert record.line(10).endswith(" skipped")
    assert " grad_norm=inf " in record.line(10)
    assert record.evaluation_line() == "step=10 val_loss=2.5000"
    of_sources = replace(record, val_losses={"a": 2.0, "b": 3.0}).evaluation_line()
    assert of_sources == "step=10 val_loss=2.5000 (a=2.0000, b=3.0000)"
    assert RECORD.evaluation_line() is None


SOMETIMES = {
    name: 1.0 + number / 7
    for number, name in enumerate(
        (
            *("data_ms", "forward_backward_ms", "reduce_ms", "optimizer_ms", "checkpoint_ms"),
            *("evaluation_ms", "val_loss", "loss_scale", "eta_seconds", "expert_load"),
        )
    )
}


@pytest.mark.parametrize("changes", [{}, {"mfu": None}, SOMETIMES, {"skipped": True}])
def test_records_round_trip_through_json(changes: dict[str, float]) -> None:
    """Catches a rounded number or a lost field when a record is written and read back."""
    record = replace(RECORD, loss=math.pi, **changes)  # type: ignore[arg-type]
    text = record.to_json()
    assert "\n" not in text
    assert StepRecord.from_json(text) == record
    for name in SOMETIMES:
        assert (name in json.loads(text)) == (name in changes), name


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite_is_null(value: float) -> None:
    """Catches NaN written as a bare word, which is not JSON."""
    text = replace(RECORD, loss=value, val_loss=value).to_json()
    values = json.loads(text, parse_constant=pytest.fail)
    assert values["loss"] is None
    read = StepRecord.from_json(text)
    assert math.isnan(read.loss)
    assert read.val_loss is not None
    assert math.isnan(read.val_loss)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "low"}, "loss: Input should be a valid number"),
        ({"step": 1.5}, "step: Input should be a valid int"),
        ({"step": None}, "step: Input should be a valid int"),
        ({"tokens": True}, "tokens: Input should be a valid int"),
        ({"skipped": 0}, "skipped: Input should be a valid bool"),
    ],
)
def test_wrong_values_are_named(changes: dict[str, object], message: str) -> None:
    """Catches a foreign object accepted as a record."""
    text = json.dumps(json.loads(RECORD.to_json()) | changes)
    with pytest.raises(ValueError, match=message):
        StepRecord.from_json(text)

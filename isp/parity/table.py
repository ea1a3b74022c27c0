"""The table of `isp check` and `isp.check`, and what it says of layouts that differ."""

from __future__ import annotations

from collections.abc import Sequence

from isp.parity.compare import TOLERANCE, Check, Differences, Verdict
from isp.utils.text import counted

__all__ = ["HEAD", "heading", "line", "summary"]

_SHOWN = 3
"""Names in a list of what differs."""

HEAD = f"{'layout':<12}{'loss':>9}{'norm':>9}{'update':>9}  gathers     result   worst gradient"


def heading(check: Check) -> str:
    """Return two or three lines: what is compared, how, and on how many ranks."""
    rules, replaced = " and ".join(sorted(check.optimizer.rules)), ", ".join(check.replaced)
    step = f"\nthe update is that of {rules}" if rules != "adamw" or replaced else ""
    if replaced:
        step += (
            f", not of {replaced}: only what adamw and muon do to a gradient that is zero but for"
            f" rounding is as small as that"
        )
    return (
        f"{check.subject.name}, on {check.num_ranks} ranks, each difference relative to its tensor"
        f"\nin float64 on CPU, {check.subject.ways}{step}"
    )


def line(verdict: Verdict) -> str:
    """A line of the table."""
    name = f"{verdict.layout!s:<12}"
    if verdict.failure:
        return f"{name}{'-':>9}{'-':>9}{'-':>9}  {'-':<12}FAILED"
    cases = list(verdict.cases.values())
    loss, norm = max(c.loss for c in cases), max(c.grad_norm for c in cases)
    update = max(max(c.weights.values()) for c in cases)
    gathers = "as planned" if any(c.gathers for c in cases) else "none"
    gathers = "OTHERS" if any(c.miscounted for c in cases) else gathers
    worst, apart = max((c.worst_gradient for c in cases), key=lambda found: found[1])
    result = "ok" if verdict.agrees else "DIFFERS"
    return f"{name}{loss:9.1e}{norm:9.1e}{update:9.1e}  {gathers:<12}{result:<9}{apart:.1e} {worst}"


def summary(verdicts: Sequence[Verdict]) -> str:
    """What differs, and in how many layouts."""
    different = [verdict for verdict in verdicts if not verdict.agrees]
    if not different:
        agree = f"all {len(verdicts)} layouts agree" if len(verdicts) > 1 else "the layout agrees"
        return f"{agree} with the plain model within {TOLERANCE:g}"
    parts = [f"\n{_explanation(verdict)}\n" for verdict in different]
    count = f"{len(different)} of {counted(len(verdicts), 'layout')}"
    differ = "differs" if len(different) == 1 else "differ"
    return "".join([*parts, f"\n{count} {differ} by more than {TOLERANCE:g}"])


def _explanation(verdict: Verdict) -> str:
    """What differs in a layout, and where first, in the first case that has it."""
    if verdict.failure:
        return f"{verdict.layout}: {verdict.failure}"
    wrong = {case: found for case, found in verdict.cases.items() if not found.agree}
    case, found = next(iter(wrong.items()))
    where = f"in {len(wrong)} of {len(verdict.cases)} cases, such as rows {case}"
    return "\n  ".join([f"{verdict.layout}, {where}:", *_faults(found)])


def _faults(found: Differences) -> list[str]:
    first = found.first_output
    faults = []
    if first is not None:
        faults.append(f"first in the forward, the output of {first} ({found.outputs[first]:.1e})")
    elif found.loss > TOLERANCE:
        faults.append("the loss, and no output of a module before it")
    for what, apart in (("gradient", found.gradients), ("new weight", found.weights)):
        names = [name for name, number in apart.items() if number > TOLERANCE]
        if names:
            shown = ", ".join(f"{name} ({apart[name]:.1e})" for name in names[:_SHOWN])
            more = f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
            faults.append(f"{len(names)} of {len(apart)} {what}s: {shown}{more}")
    if found.grad_norm > TOLERANCE:
        faults.append(f"the gradient norm ({found.grad_norm:.1e})")
    if found.miscounted:
        more = f" and {len(found.miscounted) - _SHOWN} more" * (len(found.miscounted) > _SHOWN)
        faults.append(f"transfers: {', '.join(found.miscounted[:_SHOWN])}{more}")
    return faults

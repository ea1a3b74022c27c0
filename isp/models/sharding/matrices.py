"""The matrices that the weights of a model consist of: what its code splits, heads, experts."""

from __future__ import annotations

from torch import nn

from isp.core.mesh.layout import Matrices
from isp.models.roles import (
    ParameterRole,
    expert_stacks,
    holds_experts,
    is_table_of_biases,
    is_transposed,
)
from isp.models.tracing.calls import AttentionSizes, Kind
from isp.models.tracing.trace import ModelTrace

__all__ = ["matrices_in"]


def matrices_in(model: nn.Module, trace: ModelTrace, name: str, num_uses: int) -> Matrices | None:
    """Return those of a parameter; None: it is used twice, or is no matrix.

    Norms and biases are no matrices, whatever their dimensions. Experts are those of transformers:
    where they are gated, gate and up are halves of one weight, or every other feature of it, which
    is left whole.
    """
    owner, _, local = name.rpartition(".")
    module, parameter = model.get_submodule(owner), model.get_parameter(name)
    role = trace.roles.get(name)
    is_matrix = parameter.dim() > 1 and min(parameter.shape[-2:]) > 1
    is_matrix = is_matrix and not is_table_of_biases(module, owner)
    if num_uses > 1 or not is_matrix or role is None or not role.is_cut:
        return None
    block = next((b for b in trace.blocks if name.startswith(f"{b}.")), None)
    if role is ParameterRole.EXPERT:
        turned, gated = (getattr(module, key, False) for key in ("is_transposed", "has_gate"))
        dim = -1 if turned else -2
        half, rest = divmod(parameter.shape[dim], 2)
        split = gated and not rest and module.is_concatenated and local.startswith("gate_up")
        return Matrices(block is not None, dim, (half, half) if split else ())
    dim = -1 if is_transposed(module) else -2
    siblings = [] if block is None else model.get_submodule(owner.rpartition(".")[0]).children()
    routes = any(
        holds_experts(child)
        and any(len(p) == parameter.shape[dim] for p in expert_stacks(child).values())
        for child in siblings
    )
    heads = _heads(trace, owner, block, parameter.shape[dim])
    return Matrices(block is not None and not routes, dim, trace.splits.get(owner, ()), heads)


def _heads(trace: ModelTrace, owner: str, block: str | None, length: int) -> int:
    """The heads of q, k or v, or of all in one, of which a linear ahead of attention has rows."""
    calls = () if block is None else trace.calls_in[block]
    attends = next((i for i, call in enumerate(calls) if call.kind is Kind.ATTENTION), 0)
    if not any(call.kind is Kind.LINEAR and call.module == owner for call in calls[:attends]):
        return 0
    sizes = calls[attends].sizes
    assert isinstance(sizes, AttentionSizes)
    num, kv, size, value = sizes[:4]
    ways = {num * size: num, kv * size: kv, kv * value: kv}
    if size == value:
        ways[(num + 2 * kv) * size] = num + 2 * kv
    return ways.get(length, 0)

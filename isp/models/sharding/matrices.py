"""Find the matrices that a weight consists of: parts of a fused linear, heads, experts.

Muon updates each of these matrices on its own.
"""

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
    """Return the matrices that the parameter `name` consists of.

    Returns None if it is no matrix, is not sharded, or belongs to several modules (`num_uses`).
    Norms and biases are no matrices, whatever their number of dims. Gated experts have gate and up
    in one weight, as in transformers: if these are the two halves of it, they are two matrices; if
    they alternate by feature, the weight is one matrix.
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
    # A linear next to experts with as many outputs as there are experts is a router, which Muon
    # does not update by default.
    siblings = [] if block is None else model.get_submodule(owner.rpartition(".")[0]).children()
    routes = any(
        holds_experts(child)
        and any(len(p) == parameter.shape[dim] for p in expert_stacks(child).values())
        for child in siblings
    )
    heads = _heads(trace, owner, block, parameter.shape[dim])
    return Matrices(block is not None and not routes, dim, trace.splits.get(owner, ()), heads)


def _heads(trace: ModelTrace, owner: str, block: str | None, length: int) -> int:
    """Return the number of heads whose rows make up the weight of a q, k, v or fused linear.

    Returns 0 for any other linear. `owner`: the name of the linear, which must be called before
    attention in its block; `length`: its out features, which show whether it is q, k, v or fused.
    """
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

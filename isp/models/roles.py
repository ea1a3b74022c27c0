"""The role of each parameter of a traced model, which decides how it is sharded, and its decay.

E experts, H heads, d head size, I in and O out features
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import StrEnum

from torch import nn

__all__ = [
    "ParameterRole",
    "expert_stacks",
    "holds_experts",
    "is_decayed",
    "is_linear",
    "is_table_of_biases",
    "is_transposed",
    "roles_of",
]


_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""A pattern of names of norms and biases in lower case, the one of transformers'
`Trainer.get_decay_parameter_names`."""


class ParameterRole(StrEnum):
    """Purpose of a parameter, which decides whether it is cut or whole on each rank."""

    SHARDED = "sharded"
    """A parameter of a linear or table: cut over the weight group, and gathered to be read."""
    VECTOR = "vector"
    """A norm, sink, decay, depthwise kernel or another parameter that the model's code reads
    directly: whole on each rank."""
    EXPERT = "expert"
    """A stack of expert weights [E, .., ..] whose module is called as in transformers: cut over
    ranks like `SHARDED`."""
    ROUTER = "router"
    """A router of experts, a bias of experts, or a stack of experts that are called in another
    way: whole on each rank."""
    IDLE = "idle"
    """A parameter of a linear or table that no forward calls: whole on each rank."""

    @property
    def is_cut(self) -> bool:
        """True if each rank has a part of the parameter, which is gathered to be read."""
        return self in (ParameterRole.SHARDED, ParameterRole.EXPERT)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear: torch's own, Falcon's, or GPT-2's transposed one."""
    falcon = isinstance(module, nn.Linear) and type(module).__name__ == "FalconLinear"
    return type(module) is nn.Linear or falcon or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is a linear with a weight [I, O]: `Conv1D` of transformers.

    It is recognized by its name and attribute, without importing transformers.
    """
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_decayed(model: nn.Module, name: str) -> bool:
    """Return whether weight decay applies to a parameter: not to norms, biases and vectors.

    Norms and biases may have several dimensions: of each head [H, d], of stacked experts [E, N].
    So they are recognized by name, as in transformers' Trainer, and by the class of their module.
    """
    owner = model.get_submodule(name.rpartition(".")[0])
    named = _UNDECAYED.search(name.lower()) is not None
    return model.get_parameter(name).dim() > 1 and not named and not _is_norm(owner)


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm: torch's LayerNorm, or a class whose name ends in Norm."""
    return isinstance(module, nn.LayerNorm) or type(module).__name__.lower().endswith("norm")


def is_table_of_biases(module: nn.Module, name: str) -> bool:
    """Return whether the module `name` is a table of biases (T5's `relative_attention_bias`)."""
    return isinstance(module, nn.Embedding) and "bias" in name.rpartition(".")[2].lower()


def roles_of(
    model: nn.Module, called: set[str], whole: set[str], read: Collection[str]
) -> dict[str, ParameterRole]:
    """Return the role of each parameter by name.

    `called`: the modules whose calls the trace contains. `whole`: small linears that stay whole on
    each rank, because code other than their forward reads their weights: they get the role VECTOR.
    `read`: all parameters that such code reads; if one is the bias of a linear, it also gets the
    role VECTOR.
    """
    roles: dict[str, ParameterRole] = {}
    # A parameter that several modules share has its role under its first name.
    first_name = {id(p): name for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        for local, parameter in module.named_parameters(recurse=False):
            role = ParameterRole.VECTOR
            if name not in whole and not (local == "bias" and f"{name}.bias" in read):
                role = _role(model, name, module, parameter, called)
            shared = first_name[id(parameter)]
            before = roles.get(shared)
            # A shared parameter is cut if it would be cut in any of its modules.
            if before is None or not before.is_cut:
                roles[shared] = role
    return roles


def _role(
    model: nn.Module, name: str, module: nn.Module, parameter: nn.Parameter, called: set[str]
) -> ParameterRole:
    """Return the role of a parameter of `module`, as if no other module had the parameter."""
    if is_linear(module) or isinstance(module, nn.Embedding):
        return ParameterRole.SHARDED if name in called else ParameterRole.IDLE
    if parameter.numel() == max(parameter.shape, default=1):
        # The parameter is a vector [N], or in ernie4_5_moe [1, N].
        return ParameterRole.VECTOR
    if holds_experts(module):
        stack = name in called and parameter.dim() == 3
        return ParameterRole.EXPERT if stack else ParameterRole.ROUTER
    # A matrix next to a module with experts is their router.
    parent = model.get_submodule(name.rpartition(".")[0])
    if parameter.dim() == 2 and any(holds_experts(sibling) for sibling in parent.children()):
        return ParameterRole.ROUTER
    return ParameterRole.VECTOR


def holds_experts(module: nn.Module) -> bool:
    """Return whether a module has stacked weights of experts [E, .., ..], and no linears.

    A mixer such as Zamba's also has weights of three dims [H, .., ..], but it has linears.
    """
    if type(module).__module__.startswith("torch.") or any(map(is_linear, module.children())):
        return False
    return bool(expert_stacks(module))


def expert_stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the stacked weights [E, .., ..] of a module with experts, by their local names."""
    return {name: p for name, p in module.named_parameters(recurse=False) if p.dim() == 3}

"""Put PEFT adapters on the model of a folder, whose base weights are frozen."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isp.core.layers.module import MasterStream, RowsOf
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.models.huggingface.adapter_config import AdapterConfig
from isp.models.huggingface.initial_weights import Drawing, InitialWeights, drawings
from isp.models.meta import parameters_on_meta
from isp.models.roles import is_linear
from isp.utils.files import check_regular
from isp.utils.limits import limited

__all__ = ["AdapterWeights", "adapted", "with_trained_adapters"]

_WEIGHTS = "adapter_model.safetensors"
"""The file of PEFT with an adapter's weights."""
_MOST_SECONDS = 120.0
"""The most time to match the adapter's patterns and make its modules: some regular expressions
would take forever."""
_MOST_BYTES = 2**33
"""The most memory to match the adapter's patterns and make its modules."""


def adapted(model: Any, adapter: AdapterConfig, base: str) -> Any:
    """Return a copy of `model` with adapters; both models are on the meta device.

    `base`: the model's folder, which the adapter's configuration names as its base model. Raises
    ValueError for keys that do not fit the model.
    """
    with parameters_on_meta():
        found = _with_adapters(copy.deepcopy(model), adapter)
    found.peft_config["default"].base_model_name_or_path = str(Path(base).absolute())
    return found


def _with_adapters(model: Any, adapter: AdapterConfig) -> Any:
    """Put adapters into a model, in place, and return PEFT's wrapper around it.

    Raises ValueError for keys that do not fit the model.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    given = asdict(adapter)
    del given["folder"]
    lists: dict[str, Any] = {k: list(v) if isinstance(v, tuple) else v for k, v in given.items()}
    keys = LoraConfig(**lists, task_type=TaskType.CAUSAL_LM)
    linears = {n.rpartition(".")[2] for n, m in model.named_modules() if is_linear(m)}
    pattern = f"model.adapter.target_modules={json.dumps(adapter.target_modules)}"
    limits = limited(pattern, seconds=_MOST_SECONDS, most_bytes=_MOST_BYTES)
    try:
        with limits, warnings.catch_warnings():
            # Hide these warnings, because PEFT uses functions of transformers that are deprecated.
            warnings.simplefilter("ignore", FutureWarning)
            # Keep adapters in the base model's dtype: otherwise they would be converted at every
            # call.
            return get_peft_model(model, keys, autocast_adapter_dtype=False)
    except ValueError as error:
        # `limits` raised this error, and its message already says what to do: pass it on.
        if str(error).startswith(pattern):
            raise
        raise ValueError(
            f"{pattern}:"
            f" {str(error).splitlines()[0]}{_hint(adapter.target_modules, linears)} The model's"
            f" linear layers: {', '.join(sorted(linears))}"
        ) from None


@torch.no_grad()
def with_trained_adapters(
    model: Any, adapter: AdapterConfig, state: Mapping[str, Tensor] | None = None
) -> Any:
    """Put trained adapters into a model with weights, in place, and return PEFT's wrapper.

    `state`: the adapters' weights by name; None: read them from the adapter's folder. Raises
    ValueError if the weights belong to another adapter.
    """
    found = _with_adapters(model, adapter)
    trained = {_saved_name(n): p for n, p in found.named_parameters() if p.requires_grad}
    where = "the checkpoint"
    if state is None:
        assert adapter.folder is not None
        where = f"model.adapter.folder: {Path(adapter.folder) / _WEIGHTS}"
        with _opened(Path(adapter.folder) / _WEIGHTS) as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weights = {_saved_name(name): weight for name, weight in state.items()}
    _check_same_adapter(where, {n: tuple(w.shape) for n, w in weights.items()}, trained)
    for name, parameter in trained.items():
        parameter.copy_(weights[name])
    return found.eval()


def _check_same_adapter(
    where: str, there: Mapping[str, tuple[int, ...]], trained: Mapping[str, Tensor]
) -> None:
    """Raise ValueError unless saved weights have the names and shapes of the `trained` ones.

    `there`: the shapes of the saved weights by name; `where`: where they are saved, for the error.
    """
    own = {name: tuple(parameter.shape) for name, parameter in trained.items()}
    odd = sorted(n for n in {*own, *there} if own.get(n) != there.get(n))
    if odd:
        raise ValueError(
            f"{where} belongs to another model: {odd[0]} is {there.get(odd[0], 'missing')} there"
            f" and {own.get(odd[0], 'missing')} in the adapter of this configuration: set model.hf"
            f" and model.adapter to those that it was trained with"
        )


def _hint(targets: str | Sequence[str] | None, linears: Set[str]) -> str:
    """Return a sentence that says how to correct `targets`, the user's `target_modules`, or "".

    Two mistakes are found: names of linear layers given as a text instead of a list, and all-linear
    given in a list instead of a text.
    """
    if isinstance(targets, str) and (names := re.split(r"[\s,]+", targets)) and {*names} <= linears:
        return (
            f" A text is a regular expression for whole names, or all-linear: use a list,"
            f" [{', '.join(names)}], for their last parts."
        )
    if targets is not None and [*targets] == ["all-linear"]:
        return " Use all-linear, without a list."
    return ""


class AdapterWeights:
    """The source of the initial weights of a model with adapters; implements `InitialWeights`.

    Weights of the base model come from its own source. Those of the adapters are read from
    `folder`, or drawn as PEFT initializes them, from the seed and their names. Raises ValueError if
    the folder has weights of another adapter.
    """

    def __init__(self, model: Any, base: InitialWeights, folder: str | None) -> None:
        self._base, self._model = base, model
        self._file = None if folder is None else Path(folder) / _WEIGHTS
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if self._file is None:
            return
        with _opened(self._file) as file:
            there = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        own = {_saved_name(name): parameter for name, parameter in self._trained.items()}
        _check_same_adapter(f"model.adapter.folder: {self._file}", there, own)

    @torch.no_grad()
    def fill(self, model: Any, shards: Sequence[ShardedParameter], seed: int) -> None:
        """Fill the shards of the adapters and of the base model; see `InitialWeights.fill`."""
        own = [s for s in shards if self._is_own(s)]
        rest = [replace(s, name=_base_name(s.name)) for s in shards if not self._is_own(s)]
        self._base.fill(model.get_base_model(), rest, seed)
        if self._file is not None and own:
            with _opened(self._file) as file:
                for item in own:
                    whole = file.get_tensor(_saved_name(item.name))
                    item.parameter.copy_(item.layout.shard(whole))
            return
        drawn = _drawings_of_adapters(self._model) if own else {}
        for item in own:
            stream = MasterStream(seed, *RowsOf(item.name))
            item.parameter.copy_(drawn[item.name].shard(item.layout, stream))

    def _is_own(self, item: ShardedParameter) -> bool:
        """Return whether a parameter belongs to the adapter, trained or frozen."""
        of_file = self._file is not None and item.name in self._trained
        return of_file or ".lora_" in item.name


def _drawings_of_adapters(model: nn.Module) -> dict[str, Drawing]:
    """Return by name how PEFT initializes each parameter of the adapters."""
    from peft.tuners.lora import LoraLayer

    found: dict[str, Drawing] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            layer: Any = module
            named = layer.named_parameters(prefix=name)
            own = {n: p for n, p in named if n.startswith(f"{name}.lora_")}
            found |= drawings(own, partial(layer.reset_lora_parameters, "default", True))
    return found


def _base_name(name: str) -> str:
    """Return the name of a parameter in the base model, without the names that PEFT adds."""
    return re.sub(r"(\.base_layer)+\.", ".", name.removeprefix("base_model.model."))


def _saved_name(name: str) -> str:
    """Return the name of a parameter in an adapter's folder, without the adapter name `default`."""
    return name.replace(".default.", ".").removesuffix(".default")


def _opened(file: Path) -> Any:
    """Open a safetensors file; raise ValueError that names the key if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(file)
        return safe_open(file, "pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"model.adapter.folder: {file} cannot be read: {error}") from None

"""Reading of a Hugging Face folder by the parameter names of its model.

Files on the hub keep the names and pieces of the original training code: for example, one tensor
for each expert where the model has one parameter for all. transformers has converters for them,
which are applied here to one parameter at a time.

Source: transformers, core_model_loading.py, `convert_and_load_state_dict_in_model`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isp.core.mesh.layout import ParameterLayout
from isp.models.huggingface.dequantization import DequantisedFiles

__all__ = ["ConvertedFiles"]


class _Source(NamedTuple):
    """The tensors in the files that one parameter, or several at once, are made from."""

    target: str
    """Name of the first of these parameters."""
    tensors: dict[str, list[str]]
    """Names in the files, in order, by the converter's pattern that they match."""
    converter: Any = None
    """transformers' `WeightConverter`; None: the parameter is the only tensor, renamed."""

    @property
    def names(self) -> list[str]:
        """Return all names in the files."""
        return [name for names in self.tensors.values() for name in names]


class ConvertedFiles(DequantisedFiles):
    """The tensors of a folder by the names of `model`, a transformers model on the meta device.

    Tensors that no parameter is made from are renamed by the same rules.
    """

    def __init__(self, folder: Path, model: Any) -> None:
        quantisation = getattr(model.config, "quantization_config", None)
        super().__init__(folder, quantisation, next(model.parameters()).dtype)
        self._model = model
        self._sources = _sources(model, super().names)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._sources)

    def read(self, name: str, layout: ParameterLayout | None = None) -> Tensor:
        source = self._sources[name]
        if source.converter is None:
            return super().read(source.names[0], layout)
        # Experts cut between experts: read only the files' tensors of this rank's experts.
        if layout is not None and _has_tensor_of_each_row(source, layout):
            found = [
                self._made(name, super(ConvertedFiles, self).read, slice(start, stop))
                for start, stop in layout.intervals()
                if start < stop
            ]
            part = torch.cat(found) if found else torch.empty(layout.local_shape)
            if tuple(part.shape) == layout.local_shape:  # else the converter does not stack rows
                return part
        made = self._made(name, super().read)
        return made if layout is None else layout.shard(made)

    def made_of(self, name: str) -> list[str]:
        """Return the names in the files of the tensors that `name` is made from."""
        return self._sources[name].names

    def _shape(self, name: str) -> tuple[int, ...]:
        source = self._sources[name]
        if source.converter is None:
            return super()._shape(source.names[0])
        return tuple(self._made(name, self._empty).shape)

    def _dtypes(self, name: str) -> set[str]:
        found = (super(ConvertedFiles, self)._dtypes(n) for n in self._sources[name].names)
        return set().union(*found)

    def _made(self, name: str, read: Callable[[str], Tensor], of: slice = slice(None)) -> Tensor:
        """Return a parameter made by transformers' converter from tensors that `read` returns.

        `of`: the slice of each pattern's tensors to use. Raises ValueError if they do not fit.
        """
        target, tensors, converter = self._sources[name]
        converter = copy.deepcopy(converter)  # it collects the tensors that are added to it
        for pattern, names in tensors.items():
            for found in names[of]:
                converter.add_tensor(target, found, pattern, partial(read, found))
        try:
            made = converter.convert(target, model=self._model, config=self._model.config)[name]
        except (RuntimeError, KeyError, IndexError) as error:
            parts = ", ".join(f"{len(names)} {pattern}" for pattern, names in tensors.items())
            raise ValueError(
                f"the weights in {self.folder} do not fit this model: {name} cannot be made from"
                f" {parts}: {error}"
            ) from None
        parameter: Tensor = made[0] if isinstance(made, list) else made
        return parameter

    def _empty(self, name: str) -> Tensor:
        return torch.empty(super()._shape(name), device="meta")


def _has_tensor_of_each_row(source: _Source, layout: ParameterLayout) -> bool:
    """Return whether `layout` shards dim 0, and each pattern has one tensor for each of its rows.

    So it is for experts that are sharded between experts.
    """
    rows = layout.global_shape[0]
    return layout.dim == 0 and rows > 1 and {len(n) for n in source.tensors.values()} == {rows}


def _sources(model: Any, names: Iterable[str]) -> dict[str, _Source]:
    """Return the sources of tensors among the files' `names`, by the tensors' names in `model`.

    Also sets the model's conversions, by which `save_pretrained` restores the files' names.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    known, prefix = model.state_dict(), model.base_model_prefix
    mapping = get_model_conversion_mapping(model)
    renamings = [transform for transform in mapping if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in mapping if isinstance(transform, WeightConverter)]
    of_pattern = {pattern: made for made in converters for pattern in made.source_patterns}
    sources: dict[str, _Source] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:  # renamed by mistake: the file has our name
            target, pattern = name, None
        if pattern is None:
            sources[target] = _Source(target, {name: [name]})
            continue
        converter = of_pattern[pattern]
        source = sources.setdefault(target, _Source(target, {}, converter))
        source.tensors.setdefault(pattern, []).append(name)
        first, *others = converter.target_patterns
        sources.update((target.replace(first, other), source) for other in others)
    # As `from_pretrained` does, so that `save_pretrained` writes the names of the files again.
    model._weight_conversions = [transform for transform in mapping if transform.was_used()]
    return sources

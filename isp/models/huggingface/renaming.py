"""`ConvertedFiles`: read a Hugging Face folder by the parameter names of its model.

Files on the hub keep the names and the tensors of the original training code: for example, one
tensor for each expert where the model has one parameter for all. The converters of transformers are
applied here to one parameter at a time, so that no more is in memory.

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
from isp.models.huggingface.dequantization import DequantizedFiles

__all__ = ["ConvertedFiles"]


class _Source(NamedTuple):
    """The tensors in the files from which a converter makes one parameter, or several."""

    target: str
    """The name of the first parameter that is made from the tensors."""
    tensors: dict[str, list[str]]
    """By pattern of the converter, the names in the files that match it, in order."""
    converter: Any = None
    """The `WeightConverter` of transformers; None: the parameter is a single tensor, renamed."""

    @property
    def names(self) -> list[str]:
        """The names in the files of all tensors of this source."""
        return [name for names in self.tensors.values() for name in names]


class ConvertedFiles(DequantizedFiles):
    """Reads the tensors of a folder by their names in `model`, a transformers model on meta.

    Tensors that belong to no parameter are renamed by the same rules.
    """

    def __init__(self, folder: Path, model: Any) -> None:
        quantization = getattr(model.config, "quantization_config", None)
        super().__init__(folder, quantization, next(model.parameters()).dtype)
        self._model = model
        self._sources = _sources(model, super().names)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._sources)

    def read(self, name: str, layout: ParameterLayout | None = None) -> Tensor:
        source = self._sources[name]
        if source.converter is None:
            return super().read(source.names[0], layout)
        # The parameter is a stack that is cut between experts: read only the tensors of this rank's
        # experts.
        if layout is not None and _has_tensor_of_each_row(source, layout):
            found = [
                self._made(name, super(ConvertedFiles, self).read, slice(start, stop))
                for start, stop in layout.intervals()
                if start < stop
            ]
            part = torch.cat(found) if found else torch.empty(layout.local_shape)
            # Another shape shows that the converter does not stack the tensors as rows: make the
            # whole parameter below.
            if tuple(part.shape) == layout.local_shape:
                return part
        made = self._made(name, super().read)
        return made if layout is None else layout.shard(made)

    def made_of(self, name: str) -> list[str]:
        """Return the names in the files of the tensors from which the parameter `name` is made."""
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
        """Make a parameter with transformers' converter from tensors that `read` returns.

        `of`: which of each pattern's tensors to use. Raises ValueError if the tensors do not fit.
        """
        target, tensors, converter = self._sources[name]
        # Copy the converter, because `add_tensor` changes it.
        converter = copy.deepcopy(converter)
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
        """Return a tensor on meta with the shape of a tensor in the files."""
        return torch.empty(super()._shape(name), device="meta")


def _has_tensor_of_each_row(source: _Source, layout: ParameterLayout) -> bool:
    """Return whether `layout` cuts dim 0 and the files have a tensor for each index of that dim.

    This is so for a stack that is cut between experts.
    """
    rows = layout.global_shape[0]
    return layout.dim == 0 and rows > 1 and {len(n) for n in source.tensors.values()} == {rows}


def _sources(model: Any, names: Iterable[str]) -> dict[str, _Source]:
    """Return by name in `model` the tensors that it is made from, of the `names` in the files.

    Also sets the model's conversions, by which `save_pretrained` restores the names of the files.
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
        # The file has the model's own name, and a rule of transformers would rename it by mistake.
        if target not in known and name in known:
            target, pattern = name, None
        if pattern is None:
            sources[target] = _Source(target, {name: [name]})
            continue
        converter = of_pattern[pattern]
        source = sources.setdefault(target, _Source(target, {}, converter))
        source.tensors.setdefault(pattern, []).append(name)
        first, *others = converter.target_patterns
        # A converter may make several parameters from the same tensors: they share the source.
        sources.update((target.replace(first, other), source) for other in others)
    # Set this as `from_pretrained` does, so that `save_pretrained` writes the names of the files
    # again.
    model._weight_conversions = [transform for transform in mapping if transform.was_used()]
    return sources

"""Safetensors folders of Hugging Face: reading by slices, writing one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from isp.core.mesh.layout import ParameterLayout
from isp.utils.files import check_regular, copy_regular, read_json, write_whole

__all__ = ["TOKENIZER_FILES", "WeightFiles", "WeightWriter", "copy_tokenizer", "read_json"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

_FILE_BYTES = 5 << 30
"""Size in bytes beyond which a further file begins, as in transformers."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
)
"""Files besides weights and config.json that a copy of the model needs."""


class WeightFiles:
    """The tensors in a folder's safetensors files, of which only the requested parts are read.

    All methods raise ValueError, naming the file, for one that is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / _INDEX).exists():
            files = read_json(folder / _INDEX, large=True).get("weight_map")
            if not isinstance(files, dict):
                raise ValueError(f"{folder / _INDEX} is damaged: it has no weight_map")
            for name, file in files.items():
                # A path could name any file of the machine.
                if not isinstance(file, str) or Path(file).name != file:
                    raise ValueError(
                        f"{folder / _INDEX} is damaged: weight_map gives {file!r} for {name},"
                        f" which is not a file in the same folder"
                    )
            self._files: dict[str, str] = files
        elif (folder / _SINGLE).exists():
            self._files = dict.fromkeys(self._opened(_SINGLE).keys(), _SINGLE)
        else:
            raise ValueError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
        self._open: dict[str, Any] = {}

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(self._files)

    def check(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        aliases: Iterable[str] = (),
        integers: Iterable[str] = (),
    ) -> None:
        """Raise ValueError unless the tensors have exactly these names and shapes.

        Tensors named in `aliases` may be there or not. All but `integers` must have a
        floating-point dtype of 16 bits or more.
        """
        missing = sorted(shapes.keys() - self.names)
        extra = sorted(self.names - shapes.keys() - set(aliases))
        wrong = [
            f"{name} is {list(found)}, not {list(shape)}"
            for name, shape in shapes.items()
            if name in self.names and (found := self._shape(name)) != shape
        ]
        faults = [
            f"{what}: {', '.join(found[:3])}{f' and {len(found) - 3} more' * (len(found) > 3)}"
            for what, found in (("missing", missing), ("not of the model", extra), ("size", wrong))
            if found
        ]
        if faults:
            raise ValueError(
                f"the weights in {self.folder} do not fit this model: {'; '.join(faults)}"
            )
        for name in sorted(shapes.keys() - set(integers)):
            if odd := self._dtypes(name) - _FLOATS:
                raise ValueError(
                    f"{name} in {self.folder} has dtype {min(odd)}, as quantised weights do, and"
                    f" isp reads {', '.join(sorted(_FLOATS))}: convert the model with"
                    f" transformers' dequantize and save_pretrained"
                )

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        self._open.clear()

    def read(self, name: str, layout: ParameterLayout | None = None) -> Tensor:
        """Read this rank's part of a tensor into CPU memory, or all of it without `layout`."""
        if layout is None:
            return self.read_block(name, ())
        before = (slice(None),) * layout.dim
        parts = [self.read_block(name, (*before, slice(a, b))) for a, b in layout.intervals()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, layout.dim)

    def read_block(self, name: str, block: tuple[slice, ...]) -> Tensor:
        """Read a block of a tensor, and nothing else of it, into CPU memory."""
        try:
            found: Tensor = self._slice(name)[block]
        except SafetensorError as error:
            raise self._damaged(self._files[name], error) from None
        return found

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def _dtypes(self, name: str) -> set[str]:
        """Return the dtypes in the files, by the names of safetensors such as BF16."""
        return {self._slice(name).get_dtype()}

    def _slice(self, name: str) -> Any:
        try:
            return self._handle(self._files[name]).get_slice(name)
        except SafetensorError as error:
            raise self._damaged(self._files[name], error) from None

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = self._opened(file)
        return self._open[file]

    def _opened(self, file: str) -> Any:
        try:
            check_regular(self.folder / file)
            return safe_open(self.folder / file, framework="pt")
        except FileNotFoundError:
            raise ValueError(f"{self.folder / file} is missing, but {_INDEX} names it") from None
        except OSError as error:
            why = error.strerror or error
            raise ValueError(f"{self.folder / file} cannot be read: {why}") from None
        except SafetensorError as error:
            raise self._damaged(file, error) from None

    def _damaged(self, file: str, error: Exception) -> ValueError:
        return ValueError(f"{self.folder / file} is damaged or cut short: {error}")


class WeightWriter:
    """A context that writes tensors into safetensors files, with an index if there are several.

    Holds the tensors of at most one file in memory. Files get their final names, and the index,
    only at the end, so that an unfinished folder is not taken for a model.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._written: list[list[str]] = []
        self._total = 0
        self._clear()

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one full tensor in CPU memory; write a file if enough have been added."""
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._waiting_bytes + size > _FILE_BYTES:
            self._write()
        self._waiting[name] = tensor.contiguous()
        self._waiting_bytes += size
        self._total += size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._clear()

    def _clear(self) -> None:
        """Delete unfinished files of this writer, or of an earlier one that was killed."""
        for left in self._folder.glob(".part-*.safetensors"):
            left.unlink()

    def _write(self) -> None:
        part = self._part(len(self._written))
        try:
            save_file(self._waiting, part, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{part} cannot be written: {error}") from None
        self._written.append(list(self._waiting))
        self._waiting, self._waiting_bytes = {}, 0

    def _part(self, index: int) -> Path:
        return self._folder / f".part-{index:05d}.safetensors"

    def _finish(self) -> None:
        """Write the last file, replace an older model in the folder, and rename the new files."""
        self._write()
        # An index of an older model would hide the new files, or name files that are gone.
        for stale in (*self._folder.glob("model*.safetensors"), self._folder / _INDEX):
            stale.unlink(missing_ok=True)
        count = len(self._written)
        if count == 1:
            self._part(0).rename(self._folder / _SINGLE)
            return
        weight_map = {}
        for index, names in enumerate(self._written):
            file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            self._part(index).rename(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        text = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        write_whole(self._folder / _INDEX, json.dumps(text, indent=2))


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the `TOKENIZER_FILES` that exist from one folder to another."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            copy_regular(source / name, target / name)

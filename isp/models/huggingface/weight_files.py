"""Read Hugging Face folders of safetensors by slices, and write them one tensor at a time."""

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
"""The dtypes of weights that isp reads, by their names in safetensors."""

_FILE_BYTES = 5 << 30
"""The largest size of a file in bytes, as in transformers, unless one tensor is larger."""

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
"""The files that a copy of a model needs in addition to its weights and config.json."""


class WeightFiles:
    """Reads parts of the tensors in a folder's safetensors files.

    All methods raise ValueError that names the file if a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / _INDEX).exists():
            files = read_json(folder / _INDEX, large=True).get("weight_map")
            if not isinstance(files, dict):
                raise ValueError(
                    f"{folder / _INDEX} is damaged: it has no weight_map; download or save the"
                    f" folder again"
                )
            for name, file in files.items():
                # Refuse paths: the folder may be downloaded, and could name any file here.
                if not isinstance(file, str) or Path(file).name != file:
                    raise ValueError(
                        f"{folder / _INDEX} is damaged: weight_map gives {file!r} for {name},"
                        f" which is not a file in the same folder"
                    )
            self._files: dict[str, str] = files
        elif (folder / _SINGLE).exists():
            self._files = dict.fromkeys(self._opened(_SINGLE).keys(), _SINGLE)
        else:
            raise ValueError(
                f"{folder} has neither {_SINGLE} nor {_INDEX}: name a folder with safetensors files"
            )
        self._open: dict[str, Any] = {}

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._files)

    def check(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        aliases: Iterable[str] = (),
        integers: Iterable[str] = (),
    ) -> None:
        """Raise ValueError unless the tensors have exactly these names and shapes.

        The files may also have the tensors named in `aliases`. All tensors except `integers` must
        have a floating-point dtype of 16 bits or more.
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
                    f"{name} in {self.folder} has dtype {min(odd)}, as quantized weights do, and"
                    f" isp reads {', '.join(sorted(_FLOATS))}: convert the model with"
                    f" transformers' dequantize and save_pretrained"
                )

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        self._open.clear()

    def read(self, name: str, layout: ParameterLayout | None = None) -> Tensor:
        """Read this rank's part of a tensor into CPU memory; without `layout`, the whole tensor."""
        if layout is None:
            return self.read_block(name, ())
        # A shard may consist of several intervals of its dim.
        before = (slice(None),) * layout.dim
        parts = [self.read_block(name, (*before, slice(a, b))) for a, b in layout.intervals()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, layout.dim)

    def read_block(self, name: str, block: tuple[slice, ...]) -> Tensor:
        """Read only a block of a tensor, given as a slice for each dim, into CPU memory."""
        try:
            found: Tensor = self._slice(name)[block]
        except SafetensorError as error:
            raise self._damaged(self._files[name], error) from None
        return found

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the header of its file."""
        return tuple(self._slice(name).get_shape())

    def _dtypes(self, name: str) -> set[str]:
        """Return the dtypes in which the files have a tensor, with safetensors' names such as
        BF16."""
        return {self._slice(name).get_dtype()}

    def _slice(self, name: str) -> Any:
        """Return safetensors' slice of a tensor, which reads what it is indexed with."""
        try:
            return self._handle(self._files[name]).get_slice(name)
        except SafetensorError as error:
            raise self._damaged(self._files[name], error) from None

    def _handle(self, file: str) -> Any:
        """Return an open file, which stays open until `close`."""
        if file not in self._open:
            self._open[file] = self._opened(file)
        return self._open[file]

    def _opened(self, file: str) -> Any:
        """Open a safetensors file of the folder."""
        try:
            check_regular(self.folder / file)
            return safe_open(self.folder / file, framework="pt")
        except FileNotFoundError:
            raise ValueError(
                f"{self.folder / file} is missing, but {_INDEX} names it: download or save the"
                f" folder again"
            ) from None
        except OSError as error:
            why = error.strerror or error
            raise ValueError(f"{self.folder / file} cannot be read: {why}") from None
        except SafetensorError as error:
            raise self._damaged(file, error) from None

    def _damaged(self, file: str, error: Exception) -> ValueError:
        """Return the error for a file that safetensors cannot read."""
        return ValueError(f"{self.folder / file} is damaged or cut short: {error}")


class WeightWriter:
    """A context that writes tensors into safetensors files, with an index for several files.

    At most the tensors of one file are in memory. Files get their final names, and the index is
    written, only at the end, so that an unfinished folder is not taken for a model.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._written: list[list[str]] = []
        """The names of the tensors in each file written so far."""
        self._total = 0
        self._clear()

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one whole tensor in CPU memory; write the tensors before it if a file is full."""
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
        """Write the waiting tensors into a file with a temporary name."""
        part = self._part(len(self._written))
        try:
            save_file(self._waiting, part, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{part} cannot be written: {error}") from None
        self._written.append(list(self._waiting))
        self._waiting, self._waiting_bytes = {}, 0

    def _part(self, index: int) -> Path:
        """Return the temporary name of a file."""
        return self._folder / f".part-{index:05d}.safetensors"

    def _finish(self) -> None:
        """Write the last file, replace an older model in the folder, and rename the new files."""
        self._write()
        # An old index would hide the new files, or name files that are gone.
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

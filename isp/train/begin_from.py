"""The weights of a Hugging Face folder, `model.init_from`, on each rank what it has of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from isp.checkpoint.boxes import Piece
from isp.checkpoint.state import TrainState, weight_shards
from isp.config.models import language_model
from isp.layers.rope_scaling import RopeScaling
from isp.models.build import parameter_shapes
from isp.models.model_folder import of_text, read_config
from isp.settings.json_file import read_json
from model.config import ModelConfig
from model.huggingface import CONFIG_FILE, model_values, trained_positions
from model.weight_names import WeightTable

if TYPE_CHECKING:  # most runs need no safetensors
    from isp.models.folder import WeightFiles

__all__ = ["beyond_positions", "check_folder", "load_folder"]


class _Folder(NamedTuple):
    files: WeightFiles
    table: WeightTable


def check_folder(model: ModelConfig) -> None:
    """Raise ValueError unless the folder `model.init_from` has the weights of `model`.

    Reads the heads of its files and no weights.
    """
    _opened(model)


def beyond_positions(model: ModelConfig, seq_len: int) -> str:
    """A warning of rows longer than the folder that weights begin from is for; "" without.

    Rotary positions that `model` changes are the user's own.
    """
    folder = model.hf or model.init_from
    if folder is None:
        return ""
    found = of_text(read_config(folder, model.hf_overrides))
    trained = trained_positions(found)
    if trained is None or seq_len <= trained:
        return ""
    way = "model.hf_overrides.rope_parameters"
    if model.init_from is not None:
        was, way = model_values(found), "model.rope_scaling or model.rope_theta"
        before = was["rope_scaling"] and RopeScaling(**was["rope_scaling"])
        if (model.rope_theta, model.rope_scaling) != (was["rope_theta"], before):
            return ""
    return (
        f"sequences of {seq_len:,} tokens have positions beyond the {trained:,} that"
        f" {folder}/{CONFIG_FILE} says the model was trained on: {way} may extend them"
    )


def load_folder(state: TrainState, model: ModelConfig) -> None:
    """Read weights, and master weights, from the folder `model.init_from` into this rank's shards.

    Nothing else is read. Raises ValueError for a file that is damaged.
    """
    folder = _opened(model)
    for name, shard in weight_shards(state):
        for piece in shard.pieces:
            for matrix in _matrices(piece, shard.global_shape):
                _fill(matrix, name, folder)
    if state.optimizer is not None:
        state.optimizer.states_changed()


def _opened(model: ModelConfig) -> _Folder:
    from isp.models.folder import WeightFiles

    assert model.init_from is not None
    path = Path(model.init_from)
    try:
        family = read_json(path / CONFIG_FILE)["model_type"]
        shapes = parameter_shapes(language_model(model, "float32"))
        table = WeightTable(model, family, shapes)
        files = WeightFiles(path)
        files.check(table.shapes, aliases=table.aliases)
    except ValueError as error:
        raise ValueError(f"model.init_from={path}: {error}") from None
    return _Folder(files, table)


def _matrices(piece: Piece, shape: tuple[int, ...]) -> Iterator[Piece]:
    """The piece of a parameter of this `shape`; of experts that of each, as rows of all."""
    if len(shape) < 3:
        yield piece
        return
    for index, data in enumerate(piece.data, start=piece.offsets[0]):
        yield Piece((index * shape[1] + piece.offsets[1], piece.offsets[2]), data)


def _fill(piece: Piece, name: str, folder: _Folder) -> None:
    """Read a block of parameter `name`, which may come from rows of several of their tensors."""
    begin, end = piece.offsets[0], piece.offsets[0] + piece.sizes[0]
    across = [slice(a, a + n) for a, n in zip(piece.offsets[1:], piece.sizes[1:], strict=True)]
    first = 0
    for theirs, start, rows in folder.table.pieces[name]:
        a, b = max(begin, first), min(end, first + rows)
        if a < b:
            block = (slice(start + a - first, start + b - first), *across)
            piece.data[a - begin : b - begin].copy_(folder.files.read_block(theirs, block))
        first += rows

"""Load a Hugging Face folder as a traced model; each rank reads only its shards of the weights."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isp.core.layers.module import MasterStream, RowsOf
from isp.core.mesh.layout import ParameterLayout
from isp.core.torch_private import reparametrized
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.models.huggingface.adapter_config import AdapterConfig
from isp.models.huggingface.adapters import AdapterWeights, adapted
from isp.models.huggingface.dequantization import check_readable
from isp.models.huggingface.initial_weights import Drawing, InitialWeights, drawings
from isp.models.huggingface.make import limited_model, new_model, take_out_tower
from isp.models.huggingface.overrides import OverrideError, check_overrides, overridden_config
from isp.models.huggingface.renaming import ConvertedFiles
from isp.models.huggingface.tiny import kept_in_float64
from isp.models.known_code import check_code
from isp.models.meta import parameters_on_meta
from isp.models.traced_model import TracedModel
from isp.utils.text import first_line

__all__ = [
    "begun_by_the_model",
    "empty_model",
    "exported_tensors",
    "folder_model",
    "kept_buffers",
    "meta_model",
    "parameters_on_meta",
    "plain_model",
]

logger = logging.getLogger(__name__)


@lru_cache(maxsize=64)
def folder_model(
    folder: str,
    dtype: str,
    *,
    trains: bool = True,
    overrides: str | None = None,
    adapter: AdapterConfig | None = None,
    allow_unchecked: bool = False,
    **keys: Any,
) -> TracedModel:
    """Return the traced model in `folder`, to be computed in `dtype`, without reading its weights.

    Of the weight files only the headers are read, to check names and shapes.

    `trains`: False for evaluation; a model that trains must not have dropout. `overrides`:
    `model.hf_overrides` as JSON, which can be hashed for the cache. `adapter`: only the adapter is
    trained. `keys`: arguments of `TracedModel.with_options`; the folder is read and traced once for
    all of them. In float64 all of the model is computed in float64, also what transformers keeps in
    float32. Raises ValueError if the folder has no causal language model or an unsupported one.
    """
    read = _read_and_traced(
        folder, dtype, overrides, adapter, trains=trains, allow_unchecked=allow_unchecked
    )
    return read.with_options(**keys)


@lru_cache(maxsize=8)
def _read_and_traced(
    folder: str,
    dtype: str,
    overrides: str | None,
    adapter: AdapterConfig | None,
    *,
    trains: bool,
    allow_unchecked: bool,
) -> TracedModel:
    """Read and trace the model in `folder`, once per process; errors name the key `model.hf`."""
    try:
        with limited_model(folder):
            given = json.loads(overrides) if overrides else None
            model, weights = empty_model(folder, getattr(torch, dtype), given)
            if trains:
                _check_dropout(model)
            if adapter is not None:
                model = adapted(model, adapter, folder)
                weights = AdapterWeights(model, weights, adapter.folder)
            if not trains:
                model.eval()
            check_code(model, allow_unchecked=allow_unchecked)
            return TracedModel(
                model, weights=weights, in_place=False, allow_unchecked=allow_unchecked
            )
    except OverrideError:
        # Pass it on unchanged: its message names the key `model.hf_overrides`.
        raise
    except ValueError as error:
        raise ValueError(f"model.hf={folder}: {error}") from None
    # A forward on the meta device raises these where it needs the value of a tensor.
    except (NotImplementedError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(
            f"model.hf={folder}: the model's control flow depends on tensor values, so it cannot"
            f" be traced: {first}"
        ) from error


def empty_model(
    folder: str, dtype: torch.dtype, overrides: Mapping[str, Any] | None = None
) -> tuple[nn.Module, InitialWeights]:
    """Return the model in `folder` on the meta device in training mode, and its weights' source.

    `overrides`: `model.hf_overrides`. Raises ValueError as `folder_model` does.
    """
    model = meta_model(folder, dtype, overrides)
    if overrides:
        check_overrides(folder, overrides)
    return model, _weights_of(model, Path(folder))


def exported_tensors(
    folder: str,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    overrides: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of a trained model with the names that `save_pretrained` writes.

    Names and the division into tensors are those of the files in `folder`, from which training
    began. `shapes`: the shapes of the trained parameters, by name; `read` returns one of them,
    whole. At most one block's parameters are in memory at a time. Tensors that training does not
    change come from the folder: buffers, a vision tower, and tensors that transformers does not
    load. Raises ValueError as `folder_model` does, and if `shapes` do not fit the model.
    """
    model = meta_model(folder, torch.float32, overrides)
    weights = _weights_of(model, Path(folder))
    kept = {name: buffer for name, buffer in kept_buffers(model) if name not in shapes}
    own = {n: tuple(attrgetter(n)(model).shape) for n in _names(model) if n not in kept}
    if odd := [name for name in {**own, **shapes} if own.get(name) != shapes.get(name)]:
        raise ValueError(
            f"the weights do not fit the model in {folder}: {odd[0]} is"
            f" {shapes.get(odd[0], 'missing')} instead of {own.get(odd[0], 'absent')}"
        )
    if kept:
        weights.fill(model, (), 0)
    return chain(_by_block(model, {**dict.fromkeys(own), **kept}, read), weights.untrained())


def _by_block(
    model: Any, kept: Mapping[str, Tensor | None], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that `save_pretrained` writes, block by block.

    `kept`: by name of a parameter or buffer, its value; None: call `read` for the value.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # transformers' conversion to the names in files may join or split tensors, but only those of
    # one block: it is called block by block, so that no more is in memory.
    blocks: dict[str, list[str]] = {}
    for name in kept:
        block = re.match(r".*?\.\d+\.", name)
        blocks.setdefault(block[0] if block else name, []).append(name)
    for names in blocks.values():
        whole = {name: read(name) if (x := kept[name]) is None else x for name in names}
        yield from revert_weight_conversion(model, whole).items()


def plain_model(
    folder: str,
    dtype: torch.dtype,
    overrides: Mapping[str, Any] | None = None,
    *,
    state: dict[str, Tensor] | None = None,
    device_map: str | None = None,
) -> Any:
    """Load a folder's model with `from_pretrained` of transformers, ready to generate text.

    `overrides`: `model.hf_overrides`. `state`: weights to use instead of the folder's, with the
    names of `exported_tensors`. `device_map`: that of transformers; None: CPU memory. Raises
    ValueError if transformers cannot load the model, or if it generates no text.
    """
    import transformers

    empty: Any = meta_model(folder, dtype, overrides)
    kind: Any = type(empty)
    if not kind.can_generate():
        raise ValueError(f"{folder} contains a {kind.__name__}, which generates no text")
    if state is None:
        # Call this only for its error if the files are of another model: transformers would load
        # the weights that fit.
        _weights_of(empty, Path(folder))
    config = overridden_config(folder, overrides)
    if state is not None and hasattr(config, "quantization_config"):
        # The weights in `state` are not quantized, so transformers must not expect it.
        del config.quantization_config
    try:
        model, info = kind.from_pretrained(
            folder if state is None else None,
            config=config,
            state_dict=state,
            dtype=dtype,
            device_map=device_map,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"transformers {transformers.__version__} cannot load {folder}: {first_line(error)}"
        ) from None
    if missing := sorted(info["missing_keys"]):
        # transformers has filled the missing weights with random numbers.
        raise ValueError(
            f"{folder} lacks {len(missing)} weights of the model, such as {missing[0]}"
        )
    return model.eval()


def meta_model(
    folder: str, dtype: torch.dtype, overrides: Mapping[str, Any] | None = None
) -> nn.Module:
    """Return a folder's model with parameters on the meta device, in training mode.

    A vision model still has its vision tower. Raises ValueError if transformers cannot build it.
    """
    import transformers

    try:
        config = overridden_config(folder, overrides)
        with parameters_on_meta():
            model: Any = new_model(config, dtype)
    except OverrideError:
        raise
    except Exception as error:  # transformers may raise anything for a file
        first = next(iter(str(error).strip().splitlines()), "")
        if "custom code" in first:
            first += (
                " isp runs no code that a folder brings: make the model in your own code and call"
                " isp.parallelize"
            )
        raise ValueError(
            f"transformers {transformers.__version__} cannot build a causal language model from"
            f" it: {type(error).__name__}: {first}"
        ) from None
    if dtype is torch.float64:
        model = kept_in_float64(model)
    trained: nn.Module = model.train()
    return trained


def _check_dropout(model: nn.Module) -> None:
    """Raise ValueError for a model with dropout."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError(
                f"{name} applies dropout {module.p:g}, which isp does not support: set that"
                f" dropout to 0 in config.json"
            )


# -- sources of weights ----------------------------------------------------------------------


def _weights_of(model: Any, folder: Path) -> _Files | _Random:
    """Return the source of a model's weights: its folder's files, or random numbers without files.

    Takes the vision tower out of the model, in place. Raises ValueError for files of another model
    and for weights that are not in safetensors.
    """
    if not any(folder.glob("*.safetensors*")):
        if others := sorted(path.name for path in folder.glob("*.bin")):
            raise ValueError(
                f"the weights are in {others[0]}, but isp reads only safetensors: load the model"
                f" and save it again with transformers' save_pretrained"
            )
        take_out_tower(model)
        return _Random(model)
    check_readable(getattr(model.config, "quantization_config", None))
    files = ConvertedFiles(folder, model)
    if hasattr(model.config, "quantization_config"):
        # Weights are saved without quantization, so the saved configuration must not name one.
        del model.config.quantization_config
    # `untrained`: the tensors of the files that the trained model lacks. They are not checked, and
    # an export copies them.
    tower = tuple(f"{name}." for name in take_out_tower(model))
    names = _names(model)
    untrained = {name for name in files.names if name.startswith(tower)}
    untrained |= {*_ignored(model, files.names)}
    tensors, aliases = {}, {*untrained}
    # A tied weight may be in the files under any of its names.
    for of_one in names.values():
        there = next((name for name in of_one if name in files.names), of_one[0])
        tensors[there] = attrgetter(there)(model)
        aliases.update(of_one)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    integers = {name for name, tensor in tensors.items() if not tensor.is_floating_point()}
    files.check(shapes, aliases=aliases, integers=integers)
    files.close()
    return _Files(files, names, untrained)


def _names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter and saved buffer, by its first name.

    A tied weight has several names.
    """
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return {of_one[0]: of_one for of_one in found.values()} | {
        name: [name] for name, _ in kept_buffers(model)
    }


def kept_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the buffers of a model that its state dict contains, by name."""
    kept = model.state_dict(keep_vars=True).keys()
    return (item for item in model.named_buffers() if item[0] in kept)


def _ignored(model: Any, names: Iterable[str]) -> Iterator[str]:
    """Yield those of the `names` in a model's files that no code loads.

    transformers does not load these either: the names that the model's class lists as ignored, and
    the rotary angles that earlier versions of transformers saved for each layer.
    """
    own = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = (r"rotary_emb\.inv_freq$", *own)
    return (name for name in names if any(re.search(pattern, name) for pattern in patterns))


class _Files:
    """A source of weights that reads a rank's shards from files; implements `InitialWeights`."""

    def __init__(
        self, files: ConvertedFiles, names: Mapping[str, list[str]], untrained: Iterable[str]
    ) -> None:
        """`names`: see `_names`; `untrained`: tensors of the files that are not in the model."""
        self._files = files
        self._names = names
        self._untrained = untrained

    def untrained(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the files that the trained model lacks, one in memory at a time.

        They are the tensors of a vision tower, and tensors that transformers does not load, such as
        DeepSeek-V3's heads for further tokens.
        """
        there = dict.fromkeys(n for name in self._untrained for n in self._files.made_of(name))
        return ((name, self._files.read_block(name, ())) for name in there)

    @torch.no_grad()
    def fill(self, model: nn.Module, shards: Sequence[ShardedParameter], seed: int) -> None:
        """Fill `shards` and the model's saved buffers from the files; see `InitialWeights.fill`.

        In addition to the model, one shard at a time is in memory.
        """
        if shards:
            logger.info("weights     from %s", self._files.folder)
        for item in shards:
            item.parameter.copy_(self._read(item.name, item.layout))
        for name, buffer in kept_buffers(model):
            buffer.copy_(self._read(name))
        self._files.close()

    def _read(self, name: str, layout: ParameterLayout | None = None) -> Tensor:
        """Return a parameter or buffer, or the shard of it that `layout` describes."""
        there = next(alias for alias in self._names[name] if alias in self._files.names)
        return self._files.read(there, layout)


class _Random:
    """A source of random weights from the model's own initialization; an `InitialWeights`.

    The weights depend on the seed and on the names of modules only, so they are the same in every
    layout.
    """

    def __init__(self, model: nn.Module, drawn_as: Mapping[str, RowsOf] | None = None) -> None:
        """`drawn_as`: by name of a parameter, another parameter and the rows of it whose random
        numbers it gets. So it gets the same values as in an earlier version, in which it was a part
        of the other parameter."""
        self._shape = model
        """The model, with parameters on the meta device; never changed."""
        self._drawn_as = drawn_as or {}

    def untrained(self) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over nothing, because there are no files."""
        return iter(())

    @torch.no_grad()
    def check(self) -> None:
        """Raise ValueError for a parameter that the model's `_init_weights` does not initialize.

        If the initialization of a parameter could be recorded, no weight is made to check it. The
        weights of other modules are made and checked for NaN, one module at a time.
        """
        shape: Any = copy.deepcopy(self._shape)
        for owner, module in shape.named_modules():
            own = [local for local, _ in module.named_parameters(recurse=False)]
            drawn = _recorded(shape, owner) if own else {}
            unknown = [local for local in own if not drawn[local].known]
            values = _initialized(shape, owner, 0) if unknown else {}
            for local in own:
                # A parameter is not initialized if it is still NaN, or if no operation on it was
                # recorded.
                left = values[local].isnan().any() if local in unknown else not drawn[local].calls
                if left:
                    raise ValueError(
                        f"{type(shape).__name__} does not say how to initialize"
                        f" {f'{owner}.' * bool(owner)}{local}: pass the model with weights"
                    )

    @torch.no_grad()
    def fill(self, model: nn.Module, shards: Sequence[ShardedParameter], seed: int) -> None:
        """Fill `shards` with random weights; see `InitialWeights.fill`.

        At most one module's whole weights are in memory at a time. Raises ValueError as `check`.
        """
        if not shards:
            return
        shape: Any = copy.deepcopy(self._shape)
        if hasattr(shape, "_init_weights"):
            logger.info("weights     random, as the model initializes them")
        else:
            logger.warning(
                "weights     random, as torch initializes each module: the model is on the meta"
                " device, so its own initialization code does not run"
            )
        drawn: dict[str, Drawing] = {}
        values: dict[str, Tensor] = {}
        owner_before: str | None = None
        for item in shards:
            name, layout = item.name, item.layout
            owner, _, local = name.rpartition(".")
            if owner != owner_before:
                drawn, values, owner_before = _recorded(shape, owner), {}, owner
            if drawn[local].known:
                # The initialization is recorded, so only the numbers of the shard are drawn.
                source = self._drawn_as.get(name, RowsOf(name))
                own = drawn[local].shard(layout, MasterStream(seed, *source))
            else:
                # Run the model's own code on the whole weight, and keep the shard.
                values = values or _initialized(shape, owner, seed)
                own = layout.shard(values[local])
            if own.isnan().any():
                # No code has initialized this parameter: `check` raises an error that names it.
                self.check()
            item.parameter.copy_(own)


def begun_by_the_model(
    model: nn.Module, drawn_as: Mapping[str, RowsOf] | None = None
) -> _Random | None:
    """Return a source of random weights for a model on the meta device; None if it has weights.

    Also gives buffers on the meta device their values, in place. `drawn_as`: see `_Random`. Raises
    ValueError if only some parameters are on the meta device, or if the values of buffers are lost.
    """
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if not empty:
        return None
    if len(empty) < sum(1 for _ in model.parameters()):
        raise ValueError(
            f"{empty[0]} is on the meta device, but other parameters are not: load all"
            f" weights, or none"
        )
    twin, kind = model, type(model)
    if any(buffer.is_meta for buffer in model.buffers()):
        config = getattr(model, "config", None)
        if config is None or hasattr(model, "peft_config"):
            raise ValueError(
                f"{kind.__name__} has buffers on the meta device, so their values are lost: build"
                " it inside isp.parameters_on_meta(), which keeps buffers"
            )
        # Make a new model of the same class: its code computes the buffers again.
        with parameters_on_meta():
            twin = kind(config)
        for name, buffer in twin.named_buffers():
            owner, _, local = name.rpartition(".")
            setattr(model.get_submodule(owner), local, buffer.clone())
    return _Random(copy.deepcopy(twin), drawn_as)


@contextmanager
def _own_parameters(module: nn.Module, device: str) -> Iterator[dict[str, Tensor]]:
    """Replace the module's own parameters by NaN in float32 in this context; yield them by name.

    A parameter that is still NaN afterwards was not initialized.
    """
    options: dict[str, Any] = {"dtype": torch.float32, "device": device}
    own: dict[str, Tensor] = {
        local: nn.Parameter(torch.full(parameter.shape, torch.nan, **options))
        for local, parameter in module.named_parameters(recurse=False)
    }
    with reparametrized(module, own):
        yield own


def _initialize(shape: Any, owner: str) -> None:
    """Initialize the parameters of the module `owner` itself, by the code of the model or of torch.

    Modules that contain `owner` are initialized afterwards, because GPT-2's blocks rescale the
    weights of some of their linears.
    """
    module = shape.get_submodule(owner)
    if not hasattr(shape, "_init_weights"):
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        return
    shape._init_weights(module)
    while owner:
        owner = owner.rpartition(".")[0]
        shape._init_weights(shape.get_submodule(owner))


def _recorded(shape: Any, owner: str) -> dict[str, Drawing]:
    """Return by local name the recorded initialization of a module's own parameters, without
    values."""
    with _own_parameters(shape.get_submodule(owner), "meta") as own, torch.random.fork_rng([]):
        return drawings(own, lambda: _initialize(shape, owner))


def _initialized(shape: Any, owner: str, seed: int) -> dict[str, Tensor]:
    """Return the initialized own parameters of a module, whole, in float32, by local name."""
    with _own_parameters(shape.get_submodule(owner), "cpu") as own, torch.random.fork_rng([]):
        torch.default_generator.manual_seed(MasterStream(seed, owner).generator_seed)
        _initialize(shape, owner)
        return {local: getattr(shape.get_submodule(owner), local).detach() for local in own}

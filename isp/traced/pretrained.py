"""A folder of Hugging Face as a traced model: made without memory, each rank reads its rows."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isp.layers.module import MasterStream, NamedParameter
from isp.parallel.layout import ParameterLayout
from isp.settings.attention_backend import AttentionBackend
from isp.traced.chunk import InitialWeights
from isp.traced.converted import ConvertedFiles
from isp.traced.model import TracedModel
from isp.traced.tiny import kept_in_float64

__all__ = ["begun_by_the_model", "folder_model", "parameters_on_meta"]

logger = logging.getLogger(__name__)


@lru_cache(maxsize=16)
def folder_model(
    folder: str,
    dtype: str,
    *,
    checkpoint: float = 0.0,
    checkpoint_offload: bool = False,
    checkpoint_segment: int = 0,
    attention_backend: AttentionBackend = AttentionBackend.AUTO,
    loss_chunk_tokens: int = 4096,
    trains: bool = True,
) -> TracedModel:
    """The model in `folder`, to be computed in `dtype`; of its files only the heads are read.

    One that does not train may have dropout.

    In float64 all of it is computed in float64, experts one by one. Raises ValueError if the folder
    does not hold such a model, or one that cannot be driven.
    """
    try:
        model = _made(folder, getattr(torch, dtype))
        if trains:
            _check_dropout(model)
        else:
            model.eval()
        weights = _weights_of(model, Path(folder))
        return TracedModel(
            model,
            checkpoint=checkpoint,
            checkpoint_offload=checkpoint_offload,
            checkpoint_segment=checkpoint_segment,
            attention_backend=attention_backend,
            loss_chunk_tokens=loss_chunk_tokens,
            weights=weights,
            in_place=False,
        )
    except ValueError as error:
        raise ValueError(f"model.hf={folder}: {error}") from None
    except (NotImplementedError, RuntimeError) as error:  # of a forward on the meta device
        first = str(error).splitlines()[0]
        raise ValueError(
            f"model.hf={folder}: the order of its calls depends on values, so it cannot be traced:"
            f" {first}"
        ) from error


def kept_buffers(folder: str) -> list[tuple[str, Tensor]]:
    """The buffers that belong to the weights of a folder's model, by name; no step changes them.

    Raises ValueError as `folder_model` does.
    """
    model = _made(folder, torch.float32)
    if list(_kept_buffers(model)):
        _weights_of(model, Path(folder)).fill(model, (), 0)
    return list(_kept_buffers(model))


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """In this context parameters lose their memory as modules take them; buffers keep theirs."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            grad = parameter.requires_grad
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=grad)
        register(module, name, parameter)

    setattr(nn.Module, "register_parameter", on_meta)  # noqa: B010
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010


def _made(folder: str, dtype: torch.dtype) -> nn.Module:
    import transformers

    try:
        # Not asked, transformers would ask at the terminal, on every rank.
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        with parameters_on_meta():
            model: Any = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False
            )
    except Exception as error:  # somebody else's code on somebody's file: anything may come
        first = next(iter(str(error).strip().splitlines()), "")
        if "custom code" in first:
            first += " isp runs no code that a folder brings: give isp.parallelize the model"
        raise ValueError(
            f"transformers {transformers.__version__} makes no causal language model of it:"
            f" {type(error).__name__}: {first}"
        ) from None
    if dtype is torch.float64:
        model = kept_in_float64(model)
    made: nn.Module = model.train()
    return made


def _check_dropout(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError(
                f"{name} drops {module.p:g} of its input, which isp does not do: set the dropout"
                f" that it is made with to 0 in config.json"
            )


# -- where weights come from -----------------------------------------------------------------


def _weights_of(model: nn.Module, folder: Path) -> _Files | _Random:
    """The source of a model's weights; raises ValueError for files of another model."""
    if not any(folder.glob("*.safetensors*")):
        if others := sorted(path.name for path in folder.glob("*.bin")):
            raise ValueError(
                f"its weights are {others[0]}, and isp reads safetensors: save the model once with"
                f" transformers' save_pretrained"
            )
        return _Random(model)
    _check_whole(model)
    files, names = ConvertedFiles(folder, model), _names(model)
    shapes, aliases = {}, set(_ignored(model, files.names))
    for of_one in names.values():
        there = next((name for name in of_one if name in files.names), of_one[0])
        shapes[there] = tuple(_tensor(model, there).shape)
        aliases.update(of_one)
    files.check(shapes, aliases=aliases)
    return _Files(files, names)


def _check_whole(model: Any) -> None:
    """Raise ValueError if the files are of quantised weights."""
    if found := getattr(model.config, "quantization_config", None):
        raise ValueError(
            f"its weights are quantised (config.json has quantization_config.quant_method="
            f"{found.get('quant_method')}), and isp reads whole ones: write them by transformers'"
            f" dequantize and save_pretrained, or leave the entry out if they are whole"
        )


def _names(model: nn.Module) -> dict[str, list[str]]:
    """Of each parameter and kept buffer, by its first name, all names."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return {of_one[0]: of_one for of_one in found.values()} | {
        name: [name] for name, _ in _kept_buffers(model)
    }


def _kept_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    kept = model.state_dict(keep_vars=True).keys()
    return (item for item in model.named_buffers() if item[0] in kept)


def _tensor(model: nn.Module, name: str) -> Tensor:
    owner, _, local = name.rpartition(".")
    tensor = getattr(model.get_submodule(owner), local)
    assert isinstance(tensor, Tensor)
    return tensor


def _ignored(model: Any, names: Iterable[str]) -> Iterator[str]:
    """Those that transformers, too, lets lie: also angles that models once kept by layer."""
    own = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = (r"rotary_emb\.inv_freq$", *own)
    return (name for name in names if any(re.search(pattern, name) for pattern in patterns))


class _Files:
    """Weights in files, read by slices."""

    def __init__(self, files: ConvertedFiles, names: Mapping[str, list[str]]) -> None:
        self._files = files
        self._names = names

    @torch.no_grad()
    def fill(self, model: nn.Module, shards: Iterable[NamedParameter], seed: int) -> None:
        """As `isp.traced.chunk.InitialWeights`; in hand is one shard at a time."""
        logger.info("weights     of %s", self._files.folder)
        for name, shard, layout in shards:
            shard.copy_(self._read(name, layout))
        for name, buffer in _kept_buffers(model):
            buffer.copy_(self._read(name))

    def _read(self, name: str, layout: ParameterLayout | None = None) -> Tensor:
        there = next(alias for alias in self._names[name] if alias in self._files.names)
        return self._files.read(there, layout)


class _Random:
    """Weights as the model itself begins them; a function of the seed and of modules' names."""

    def __init__(self, model: nn.Module) -> None:
        self._shape = model
        """On the meta device, but for its buffers; never changed."""

    @torch.no_grad()
    def fill(self, model: nn.Module, shards: Iterable[NamedParameter], seed: int) -> None:
        """As `isp.traced.chunk.InitialWeights`; in hand is one module's own at a time.

        Raises ValueError for a parameter that the model's `_init_weights` leaves as it is.
        """
        shape: Any = copy.deepcopy(self._shape)
        if hasattr(shape, "_init_weights"):
            logger.info("weights     random, as the model begins them")
        else:
            logger.warning(
                "weights     random, as torch begins each module: what else the model's own code"
                " does to them is not done for a model on the meta device"
            )
        values: dict[str, Tensor] = {}
        owner_before: str | None = None
        for name, shard, layout in shards:
            owner, _, local = name.rpartition(".")
            if owner != owner_before:
                values, owner_before = _begun(shape, owner, seed), owner
            if values[local].isnan().any():
                raise ValueError(
                    f"{type(shape).__name__} does not say how {name} begins: give the model with"
                    f" weights"
                )
            shard.copy_(layout.shard(values[local]))


def begun_by_the_model(model: nn.Module) -> InitialWeights | None:
    """The source of the weights of a model on the meta device; None for one that has weights.

    Its buffers get their values, in place. Raises ValueError for a model with only some weights,
    and for one whose buffers nobody can make.
    """
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if not empty:
        return None
    if len(empty) < sum(1 for _ in model.parameters()):
        raise ValueError(
            f"{empty[0]} is on the meta device, other parameters are not: load it, too"
        )
    twin, kind = model, type(model)
    if any(buffer.is_meta for buffer in model.buffers()):
        config = getattr(model, "config", None)
        if config is None or hasattr(model, "peft_config"):
            raise ValueError(
                f"{kind.__name__} has buffers on the meta device, whose values isp does not know:"
                f" make it in isp.traced.pretrained.parameters_on_meta(), which leaves them alone"
            )
        with parameters_on_meta():
            twin = kind(config)
        for name, buffer in twin.named_buffers():
            owner, _, local = name.rpartition(".")
            setattr(model.get_submodule(owner), local, buffer.clone())
    return _Random(copy.deepcopy(twin))


def _reset(module: nn.Module) -> None:
    """Let a module of torch's begin its own parameters."""
    if any(not parameter.is_meta for parameter in module.parameters(recurse=False)):
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()


def _begun(shape: Any, owner: str, seed: int) -> dict[str, Tensor]:
    """The own parameters of a module as the model begins them, in float32, by local name.

    Modules around it have a say, too: GPT-2 scales some of their linears.
    """
    module, stream = shape.get_submodule(owner), MasterStream(seed, owner)
    empty = dict(module.named_parameters(recurse=False))
    for local, parameter in empty.items():
        value = torch.full(parameter.shape, torch.nan, dtype=torch.float32)
        module.register_parameter(local, nn.Parameter(value))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream.generator_seed)
        begin = getattr(shape, "_init_weights", _reset)
        begin(module)
        while owner:
            owner = owner.rpartition(".")[0]
            begin(shape.get_submodule(owner))
    values = {local: getattr(module, local).detach() for local in empty}
    for local, parameter in empty.items():
        module.register_parameter(local, parameter)
    return values

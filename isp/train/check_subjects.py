"""Small models for `isp check`: of a Hugging Face configuration, or of the decoder's keys."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isp.comm import Mesh
from isp.config.models import language_model
from isp.models.build import build_model
from isp.models.folder import read_json
from isp.models.hosts import Host
from isp.models.model import TracedModel
from isp.models.tiny import kept_in_float64, tiny_model
from isp.parallel import ParallelConfig
from isp.parallel.topology import Topology
from isp.settings.recomputation import Recomputation
from isp.train.check_reference import modules_of
from model import plain
from model.config import ModelConfig
from model.decoder import Decoder

__all__ = [
    "DecoderSubject",
    "HuggingFaceSubject",
    "OwnSubject",
    "decoder_subject",
    "num_blocks",
    "read_folder",
]


_TILE_TOKENS, _LOSS_CHUNK_TOKENS, _SEGMENT = 5, 7, 2
"""At most, of a small model: with more, it would have one tile, chunk or segment."""

_DEFAULT = ModelConfig()


def num_blocks(stages: int, how: ModelConfig) -> int:
    """Blocks of a small model of so many stages: of two segments each, where `how` has those."""
    return stages * (_SEGMENT + 1 if how.checkpoint_segment else 1)


class _TracedSubject:
    """A small model, computed as the keys `how` say; their sizes are not read."""

    def __init__(self, name: str, model: nn.Module, how: ModelConfig) -> None:
        self.name = name
        self.model = model
        self._recomputation = how.recomputation._replace(
            mlp_tile_tokens=min(how.mlp_tile_tokens, _TILE_TOKENS),
            segment=min(how.checkpoint_segment, _SEGMENT),
        )
        chunk = min(how.loss_chunk_tokens, _LOSS_CHUNK_TOKENS)
        self._traced = TracedModel(model, recomputation=how.recomputation, loss_chunk_tokens=chunk)
        self.vocab_size = min(self._traced.vocab_rows, self._traced.trace.vocab_size)

    def plain(self) -> _Plain:
        return _Plain(copy.deepcopy(self.model), self._traced.host)

    def language_model(self, checkpoint: float) -> TracedModel:
        wanted = self._recomputation
        part = checkpoint * (wanted.checkpoint or 1.0)
        if not part:
            tile, between = wanted.mlp_tile_tokens, wanted.between_linears
            wanted = Recomputation(mlp_tile_tokens=tile, between_linears=between)
        recomputation = wanted._replace(checkpoint=part)
        # to trace takes as long as a step
        return self._traced.computed(model=copy.deepcopy(self.model), recomputation=recomputation)


class HuggingFaceSubject(_TracedSubject):
    """A small model of the same structure as a large one of transformers."""

    def __init__(self, config: Any, layers: int = 2, how: ModelConfig = _DEFAULT) -> None:
        """With so many layers at least, if the large one has them."""
        super().__init__(config.model_type, tiny_model(config, layers), how)


class OwnSubject(_TracedSubject):
    """A copy of a module of one's own as it is, in float64 on the CPU, without dropout."""

    def __init__(self, model: nn.Module, how: ModelConfig = _DEFAULT) -> None:
        copied = copy.deepcopy(model).to("cpu").eval()
        super().__init__(type(model).__name__, kept_in_float64(copied), how)


class _Plain:
    """The model alone; one of transformers with its own attention in plain tensor operations."""

    def __init__(self, model: Any, host: Host) -> None:
        self._model = model
        self._host = host
        if hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation("eager")

    def logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self._host.forward(self._model, ids, positions)

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters())

    def modules(self) -> dict[str, nn.Module]:
        return dict(self._model.named_modules())


def decoder_subject(config: ModelConfig, layers: int = 2) -> DecoderSubject | OwnSubject:
    """A small decoder with the options of `config`, as runs of it compute it."""
    subject = DecoderSubject(config, layers)
    small = subject.language_model(0.0)
    if isinstance(language_model(small, "float64"), ModelConfig):
        return subject
    decoder = plain.Decoder(small).double()
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return OwnSubject(decoder, config)


class DecoderSubject:
    """A small decoder with the options of `config`, which is held against itself on one rank."""

    name = "isp's own decoder"

    def __init__(self, config: ModelConfig, layers: int = 2) -> None:
        share, kv_heads = min(config.num_heads // config.kv_heads, 4), 4
        self._config = replace(
            config,
            preset=None,
            vocab_size=160,
            hidden_size=64,
            num_layers=layers,
            num_heads=kv_heads * share,
            num_kv_heads=kv_heads,
            head_dim=8,
            intermediate_size=48,
            sliding_window=config.sliding_window and min(config.sliding_window, 9),
            init_std=0.2,
            mlp_tile_tokens=min(config.mlp_tile_tokens, 5),
        )
        self.vocab_size = self._config.vocab_size

    def plain(self) -> _PlainDecoder:
        return _PlainDecoder(replace(self.language_model(0.0), mlp_tile_tokens=0))

    def language_model(self, checkpoint: float) -> ModelConfig:
        config = self._config
        return replace(
            config,
            checkpoint=checkpoint,
            checkpoint_distribute_activations=config.checkpoint_distribute_activations
            and checkpoint > 0,
            checkpoint_offload=config.checkpoint_offload and checkpoint > 0,
            checkpoint_segment=config.checkpoint_segment if checkpoint > 0 else 0,
        )


class _PlainDecoder:
    """The decoder on one rank, with vectors that are not uniform."""

    def __init__(self, config: ModelConfig) -> None:
        parallel = ParallelConfig()
        built = build_model(
            config,
            parallel,
            Mesh(Topology.create(1, parallel), 0),
            seed=0,
            device=torch.device("cpu"),
            dtype=torch.float64,
        )
        (chunk,) = built.chunks
        assert isinstance(chunk, Decoder)
        self._chunk = chunk
        self._parameters = {item.name: item.parameter for item in built.parameters}
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self._parameters.values():
                if parameter.dim() < 2:
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.add_(noise, alpha=0.1)

    def logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self._chunk.logits(self._chunk(ids, positions, None))

    def parameters(self) -> dict[str, nn.Parameter]:
        return self._parameters

    def modules(self) -> dict[str, nn.Module]:
        return modules_of([self._chunk])


def read_folder(folder: Path) -> Any:
    """The configuration of the model in a Hugging Face folder; no weights are read.

    Raises ValueError for a folder without one, or one that transformers does not know.
    """
    kind = read_json(folder / "config.json").get("model_type")
    try:
        from transformers import AutoConfig, logging
    except ImportError:
        raise ValueError(
            f"{folder} needs the package transformers, which is not installed:"
            f" bash tools/setup_env.sh hf (or pip install transformers)"
        ) from None
    logging.set_verbosity_error()  # of faster kernels, and token ids beyond a small vocabulary
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (KeyError, OSError, TypeError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{folder / 'config.json'} (model_type {kind!r}) cannot be read by transformers:"
            f" {first_line}"
        ) from error
    return config

"""`Source`: a trained model to evaluate, from a run, a checkpoint, or a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn

from isp.checkpoint import Checkpointer, TrainState
from isp.checkpoint.folder import CheckpointInfo, newest_at
from isp.checkpoint.state import CheckpointWeights, check_shapes
from isp.config.sections import DTYPES, CheckpointConfig
from isp.core.comm import Mesh
from isp.core.mesh import Axis, ParallelConfig
from isp.core.section import KeyRole, defaults_of
from isp.data.chat import ChatTemplate
from isp.data.tokenizer import HFTokenizer, Tokenizer, load_tokenizer, with_bos
from isp.evaluation.engine import Engine
from isp.models.build import build_model, parameter_shapes
from isp.models.huggingface.adapter_config import ADAPTER_FILE, with_adapter
from isp.models.huggingface.adapters import adapted, with_trained_adapters
from isp.models.huggingface.config_json import read_text_config
from isp.models.huggingface.make import limited_model, take_out_tower
from isp.models.loading import meta_model, plain_model
from isp.models.traced_model import TracedModel, position_rows
from isp.train.state.export import as_saved, plain_decoder, saved_model
from isp.train.state.saved_run import saved_config
from isp.utils.environment import require
from isp.utils.files import download_hint, read_json
from model.build import language_model
from model.config import ModelConfig
from model.huggingface import CONFIG_FILE

__all__ = ["Source", "open_source"]

_TILE_TOKENS = 4096
"""Tokens that an MLP of the decoder computes at a time, which bounds memory for long prompts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """A trained model, whose weights are read only by `plain` and `engine`, and its tokenizer."""

    title: str
    """Where the model comes from, in words."""
    section: ModelConfig
    """The `model` section of its configuration; for a Hugging Face folder it has only the path."""
    dtype: str
    tokenizer: Tokenizer
    ends: frozenset[int]
    """Tokens that end a document."""
    trained_length: int | None
    """Tokens of the training sequences; None if not known."""
    checkpoint: Path | None
    """Path of the run or checkpoint with the weights; None if they are in `section.hf`, or in the
    folder of its adapter."""
    data: Mapping[str, Any]
    """The `data` section of its training, but with the tokenizer that is used now."""
    adds_special_tokens: bool
    """True if prompts get all special tokens that the tokenizer adds, as in transformers."""

    @cached_property
    def model(self) -> TracedModel:
        """The traced model, for evaluation on ranks.

        Raises ValueError if it is not supported, or if the checkpoint's weights do not fit it.
        """
        section = self.section
        if section.hf is None:
            section = replace(section, mlp_tile_tokens=_TILE_TOKENS)
        found = language_model(section, self.dtype, trains=False)
        if self.checkpoint is not None:
            check_shapes(newest_at(self.checkpoint), parameter_shapes(found), found.earlier_names)
        return found

    @cached_property
    def _base(self) -> Any:
        """The plain model of `section.hf` on the meta device, without adapters or vision tower."""
        folder = self.section.hf
        assert folder is not None
        require(f"model.hf={folder}", "transformers", "safetensors")
        if self.section.adapter is not None:
            require("model.adapter", "peft", extra="peft")
        try:
            with limited_model(folder):
                model = meta_model(folder, torch.float32, self.section.hf_overrides)
        except ValueError as error:
            raise ValueError(f"model.hf={folder}: {error}") from None
        if self.section.adapter is not None:
            # Only to raise errors about the adapter here, before weights are read.
            adapted(model, self.section.adapter, folder)
        # `position_limit` would also find the vision tower's embeddings of positions in images.
        take_out_tower(model)
        return model

    @property
    def position_limit(self) -> int | None:
        """Number of rows in the table of learned positions; None if the model has no such table."""
        if self.section.hf is None:
            return None
        of_tokens = self._base.get_input_embeddings()
        # Embeddings other than that of the tokens may be of positions.
        tables = [m for m in self._base.modules() if isinstance(m, nn.Embedding)]
        return position_rows(self._base, [table for table in tables if table is not of_tokens])

    @property
    def vocab_size(self) -> int:
        """Number of rows in the table of token embeddings."""
        if self.section.hf is None:
            return self.section.vocab_size
        return int(self._base.get_input_embeddings().weight.shape[0])

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the special tokens that a text begins with.

        Raises ValueError for a token that is not in the model's vocabulary.
        """
        if self.adds_special_tokens and isinstance(self.tokenizer, HFTokenizer):
            return self._checked(self.tokenizer.encode_prompt(text))
        tokens = self.tokenizer.encode(text)
        if self.data["add_bos"]:
            tokens = with_bos(tokens, self.tokenizer.bos)
        return self._checked(tokens.tolist())

    def _checked(self, found: list[int]) -> list[int]:
        """Return the tokens `found`; raise ValueError if one is not in the model's vocabulary."""
        if (largest := max(found, default=0)) >= self.vocab_size:
            raise ValueError(
                f"the tokenizer produces token {largest:,} for the prompt, but the model has only"
                f" {self.vocab_size:,}: use --tokenizer to name the tokenizer of the training run"
            )
        return found

    def chat_template(self, path: str | None = None) -> ChatTemplate:
        """Return the chat template in the file `path`; None: the one of the model's training."""
        return ChatTemplate(self.tokenizer, path or self.data.get("chat_template"))

    def encode_chat(self, text: str) -> list[int]:
        """Return the tokens of a rendered conversation, adding no special tokens.

        The chat template has written them into the text.
        """
        return self._checked(self.tokenizer.encode(text).tolist())

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt as `encode` does; raise ValueError if it is empty."""
        if not len(self.tokenizer.encode(text)):
            raise ValueError(f"the prompt {text!r} is empty: give it at least one token")
        return self.encode(text)

    def check_lengths(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> str:
        """Return a warning if prompts with their new tokens are longer than in training, else "".

        Raises ValueError if they do not fit the table of positions.
        """
        longest = max(map(len, prompts))
        # The last new token needs no position: nothing is computed from it.
        needed, limit = longest + new_tokens - 1, self.position_limit
        if limit is not None and needed > limit:
            fits = (
                f": --max-new-tokens {limit - longest + 1} fits"
                if longest <= limit
                else ": use a shorter prompt"
            )
            raise ValueError(
                f"a prompt of {longest:,} tokens and --max-new-tokens {new_tokens} need"
                f" {needed:,} positions, and the model has a table of {limit:,}{fits}"
            )
        trained = self.trained_length
        if trained is not None and needed > trained:
            return (
                f"a prompt of {longest:,} tokens and {new_tokens:,} new ones go beyond the"
                f" {trained:,} that the model was trained on"
            )
        return ""

    def plain(self, device: torch.device, device_map: str | None = None) -> Any:
        """Return the plain model with its weights: of transformers, or the decoder of `model/`.

        It is on `device`, or where `device_map` says (a model of transformers only).
        """
        section, dtype = self.section, getattr(torch, self.dtype)
        weights = None if self.checkpoint is None else CheckpointWeights(self.checkpoint)
        if section.hf is None:
            assert weights is not None
            return plain_decoder(weights, section, self.dtype).to(device)
        state = None
        if weights is not None and section.adapter is None:
            state = dict(as_saved(weights, section.hf, self.dtype, section.hf_overrides))
        model = plain_model(
            section.hf, dtype, section.hf_overrides, state=state, device_map=device_map
        )
        if section.adapter is not None:
            own = None
            if weights is not None:
                own = {name: weights.read(name) for name in weights.shapes}
            model = with_trained_adapters(model, section.adapter, own)
        return model if device_map is not None else model.to(device)

    def engine(self, parallel: ParallelConfig, mesh: Mesh, device: torch.device) -> Engine:
        """Build the model with its weights on the ranks of `mesh`; a collective."""
        # `build_model` reads the weights in `section.hf` only if it gets a seed. Read them unless
        # the checkpoint has all weights: that of a run with an adapter lacks the base model's.
        reads_folder = self.checkpoint is None or self.section.adapter is not None
        built = build_model(
            self.model,
            parallel,
            mesh,
            seed=0 if self.section.hf is not None and reads_folder else None,
            device=device,
            dtype=getattr(torch, self.dtype),
        )
        if self.checkpoint is not None:
            state = TrainState(
                parameters=built.saved,
                optimizer=None,
                topology=mesh.topology,
                earlier_names=built.model.earlier_names,
            )
            world, folder = mesh[Axis.WORLD], self.checkpoint
            with Checkpointer(folder, CheckpointConfig(), world=world) as checkpointer:
                info = checkpointer.choose_initial(folder)
                checkpointer.load(info, state, weights_only=True)
        return Engine(built, mesh, device)


def open_source(path: Path, *, dtype: str | None = None, tokenizer: str | None = None) -> Source:
    """Return the model at `path`, without reading its weights.

    `dtype` and `tokenizer` replace those of the model. Raises ValueError, in one line, if it cannot
    be read.
    """
    if not path.exists():
        raise ValueError(
            f"{path} does not exist: name a run, a checkpoint, or a folder of a model"
            f"{download_hint(path)}"
        )
    if any((path / name).is_file() for name in (CONFIG_FILE, ADAPTER_FILE)):
        source = _of_folder(path, dtype, tokenizer)
    else:
        source = _of_checkpoint(newest_at(path), path, dtype, tokenizer)
    entries = source.tokenizer.vocab_size
    if tokenizer is not None and entries > source.vocab_size:
        raise ValueError(
            f"--tokenizer {tokenizer} has {entries:,} entries, and the model {source.vocab_size:,}:"
            f" use the one that it was trained with"
        )
    return source


def _of_checkpoint(
    info: CheckpointInfo, path: Path, dtype: str | None, tokenizer: str | None
) -> Source:
    """Return the model of the checkpoint `info`, which was found at `path`."""
    section = _to_read(saved_model(info))
    kept: Any = saved_config(info)
    data = kept["data"]
    if tokenizer is not None:
        data = {**data, "tokenizer": tokenizer, "eos_token": None, "chat_template": None}
    if section.hf is not None and not (Path(section.hf) / CONFIG_FILE).is_file():
        raise ValueError(
            f"{info.path} belongs to model.hf={section.hf}, which does not exist: its"
            f" {CONFIG_FILE} is needed; relative paths start at the folder in which the run was"
            f" started"
        )
    own = load_tokenizer(data["tokenizer"], eos_token=data["eos_token"])
    ends = frozenset() if section.hf is None else _ends(section.hf, section.hf_overrides)
    return Source(
        title=f"{info.path}, {info.step} steps",
        section=section,
        dtype=dtype or kept["training"]["dtype"],
        tokenizer=own,
        ends=frozenset([own.eos_id]) | ends,
        trained_length=data["seq_len"],
        checkpoint=path,
        data=data,
        adds_special_tokens=False,
    )


def _of_folder(path: Path, dtype: str | None, tokenizer: str | None) -> Source:
    """Return the model of the Hugging Face folder `path`: of a model, or of an adapter for PEFT."""
    require(f"the model in {path}", "transformers", "safetensors")
    named = with_adapter({"hf": str(path)})
    base = Path(named["hf"])
    described = read_text_config(str(base))
    # The folder of an adapter may have a tokenizer of its own, else its base model's is used.
    texts = path if (path / "tokenizer.json").is_file() else base
    if tokenizer is None and not (texts / "tokenizer.json").is_file():
        raise ValueError(
            f"{texts} has no tokenizer.json: name a tokenizer with --tokenizer, a path or bytes"
        )
    file = tokenizer or str(texts)
    own = load_tokenizer(file)
    # transformers 5 writes `dtype`, earlier versions `torch_dtype`.
    saved = described.get("dtype") or described.get("torch_dtype")
    return Source(
        title=str(path),
        section=TypeAdapter(ModelConfig).validate_json(json.dumps(named)),
        dtype=dtype or (saved if saved in DTYPES else "float32"),
        tokenizer=own,
        ends=frozenset([own.eos_id]) | _ends(str(base)),
        trained_length=described.get("max_position_embeddings", described.get("n_positions")),
        checkpoint=None,
        data={"tokenizer": file, "add_bos": True},
        adds_special_tokens=True,
    )


def _ends(folder: str, overrides: Mapping[str, Any] | None = None) -> frozenset[int]:
    """Return the ids of tokens at which transformers would stop to generate.

    Raises ValueError if the folder names something else than ids.
    """
    # As in transformers, generation_config.json comes before config.json.
    of_text = Path(folder) / "generation_config.json"
    found = read_json(of_text).get("eos_token_id") if of_text.is_file() else None
    found = read_text_config(folder, overrides).get("eos_token_id") if found is None else found
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if odd := [end for end in ends if not isinstance(end, int)]:
        raise ValueError(
            f"{folder} has the eos_token_id {odd[0]!r:.40}, which is no token: correct it in"
            f" {CONFIG_FILE} or {of_text.name}"
        )
    return frozenset(ends)


def _to_read(model: ModelConfig) -> ModelConfig:
    """Return the `model` section with defaults for keys that do not change the model.

    Such keys say how a run computed it (kernels, recomputation) or where it found files, which need
    not suit this machine.
    """
    defaults = defaults_of(ModelConfig, KeyRole.METHOD, KeyRole.PLACE)
    adapter = model.adapter and replace(model.adapter, folder=None)
    return replace(model, **{**defaults, "hf": model.hf, "adapter": adapter})

"""`isp.check`: compares layouts of a model in the caller's process with the plain model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any, NamedTuple

import torch
from torch import nn

from isp.config import ConfigError, sections_from
from isp.core.mesh import ParallelConfig
from isp.core.optim.config import OptimizerConfig
from isp.core.section import KeyRole, defaults_of, section
from isp.parity.compare import HEAD, Check, Verdict, heading, line, summary
from isp.parity.layouts import TOKENS, Layout, layouts_of, most_stages
from isp.parity.subjects import Subject, num_blocks
from model.config import ModelConfig

__all__ = ["CheckKeys", "CheckResult", "check", "keys_from"]


@section("")
class CheckKeys:
    """Sections of the configuration that a check accepts if the model comes without a YAML file.

    That is a user's module or a Hugging Face folder; a YAML file is read as a `JobConfig`.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    """How the model is computed."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the model is split; sizes come from the layouts."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The update rule."""


_DEFAULT = ModelConfig()

_UNREAD = {
    **defaults_of(ModelConfig, KeyRole.MODEL, KeyRole.PLACE),
    "attention_backend": _DEFAULT.attention_backend,
}
"""Keys of `model` that a check sets itself; each must have its default, given here."""


def keys_from(overrides: Sequence[str], given: str, *, folder: str | None = None) -> CheckKeys:
    """Return the sections of a check with the command-line `overrides` applied.

    `given` describes the model in errors. `folder` is the model's Hugging Face folder, if it has
    one; `model.hf_overrides` may then change its config.json. Raises ConfigError for keys that have
    no effect on a check.
    """
    keys = sections_from(CheckKeys, overrides, {} if folder is None else {"model": {"hf": folder}})
    for key, default in {**_UNREAD, "hf": folder}.items():
        if getattr(keys.model, key) != default and (folder is None or key != "hf_overrides"):
            raise ConfigError(
                f"model.{key} is decided by the check, which computes a small model on the CPU:"
                f" leave it out"
            )
    # Each layout sets sizes and modes, so overrides of these would be ignored silently.
    if Layout(1, 1).of(keys.parallel) != keys.parallel:
        raise ConfigError(
            "the checked layouts set sizes and modes of parallel: leave these keys out, and name"
            " layouts, such as --layouts 2x4,mtp2"
        )
    keys.model.check_beside(given)
    return keys


class CheckResult(NamedTuple):
    """Result of `check`; printing it shows the table of `isp check`."""

    heading: str
    """Lines above the table: what is compared, how, and on how many ranks."""
    verdicts: tuple[Verdict, ...]
    """The result of each layout, with the differences in each case."""

    @property
    def agrees(self) -> bool:
        """Return True if all layouts compute the same as the plain model."""
        return all(verdict.agrees for verdict in self.verdicts)

    def __str__(self) -> str:
        return "\n".join([self.heading, HEAD, *map(line, self.verdicts), summary(self.verdicts)])

    def __repr__(self) -> str:
        return str(self)


def check(model: nn.Module, layouts: str = "all", overrides: Sequence[str] = ()) -> CheckResult:
    """Compare layouts of `model` with the plain model, in float64 on CPU ranks of this machine.

    Each layout trains one step: packed and not, recomputed and not. The loss, every gradient, the
    updated weights and the number of gathers are compared. `model` itself is not changed.
    `layouts` is as in `isp check --layouts`: "all", or a list such as "2x2,4x1,mtp2". `overrides`
    are as in `isp train`, such as ["--model.checkpoint=1", "--model.checkpoint_offload"].

    Your own module runs as it is, with its weights and without dropout, on sequences of 48 tokens
    or a few more, so pass one with few and small layers. For a model of transformers, a small model
    with the same structure is made from its configuration; a class that you derive from one of
    transformers' runs as it is.

    Raises RuntimeError, with the table and the first differences, if a layout differs. Raises
    ValueError if the model is not supported, or if torch finds a GPU: set CUDA_VISIBLE_DEVICES= for
    the process.
    """
    # With a GPU, autograd starts threads for devices. A fork does not copy threads, so a backward
    # on a forked rank would wait for them forever.
    if torch.cuda.is_available():
        raise ValueError(
            "isp.check computes on forked CPU ranks, which cannot run backward where torch finds a"
            " GPU: run it with CUDA_VISIBLE_DEVICES= (empty) in the environment"
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the ranks share the cores
    try:
        with torch.random.fork_rng(devices=[]):  # leave the caller's random state as it is
            torch.manual_seed(0)
            result = _check(model, layouts, overrides)
    finally:
        torch.set_num_threads(threads)
    if not result.agrees:
        raise RuntimeError(str(result))
    return result


def _check(model: nn.Module, layouts: str, overrides: Sequence[str]) -> CheckResult:
    """Return the result of `check`, whether or not the layouts agree."""
    keys = keys_from(overrides, f"the {type(model).__name__} that isp.check is given")
    blocks = num_blocks(most_stages(layouts), keys.model)
    subject = _subject_of(model, blocks, keys.model)
    chosen, _ = layouts_of(layouts, subject, keys.parallel)
    try:
        comparison = Check(subject, chosen, parallel=keys.parallel, optimizer=keys.optimizer)
    except (IndexError, RuntimeError) as error:  # raised by the plain model's own code
        raise ValueError(
            f"{subject.name} alone, without a layout, fails on sequences of {TOKENS} tokens: pass a"
            f" model that runs on them: {error}"
        ) from error
    return CheckResult(heading(comparison), tuple(comparison.run(layout) for layout in chosen))


def _subject_of(model: nn.Module, layers: int = 2, how: ModelConfig = _DEFAULT) -> Subject:
    """Return the subject of a check: a small model of the same class if transformers makes one.

    Other models are checked as they are. `how`: keys that say how the model is computed.
    """
    if hasattr(model, "peft_config"):
        raise ValueError("isp.check makes a small model without adapters: give it the base model")
    if hasattr(model, "set_attn_implementation"):
        whole: Any = model
        small = Subject.of_config(whole.config, layers, how)
        # transformers makes its own class: a class derived from that would be checked without its
        # own code.
        if isinstance(small.model, type(model)):
            return small
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "isp.check needs the weights of a module, but some are on the meta device: make it on"
            " the CPU"
        )
    return Subject.of_module(model, how)

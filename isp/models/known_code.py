"""Check that the code of transformers that ISP replaces is code that ISP was compared with.

known_code.txt has hashes of that code. Code with another hash is compared with ISP's own in a small
copy of the model before a run starts. See [Note: Known code] in docs/design/notes/models.md.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import inspect
import logging
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isp.core.comm import Channel
from isp.core.layers.rank_layers import RankLayers
from isp.core.mesh import Mode
from isp.core.weights.sharded_parameter import by_whole
from isp.core.weights.wp_communicator import LocalWeights
from isp.models.huggingface.interface import HuggingFace, interface_of
from isp.models.huggingface.patches.calls import FREE_FUNCTIONS, replaced_code
from isp.models.huggingface.patches.indexers import PLACE
from isp.models.huggingface.tiny import tiny_model
from isp.models.huggingface.versions import NEWEST_TRANSFORMERS, is_first_rank
from isp.models.traced_model import TracedModel

__all__ = ["KNOWN", "check_code", "known_code", "local_layers", "source_hash", "unknown_code"]

logger = logging.getLogger(__name__)

KNOWN = Path(__file__).with_name("known_code.txt")
"""The file of known hashes, which tools/check_architectures.py --sources writes."""

_LENGTHS = 29, 19
"""Tokens of the two documents of a comparison, more than windows and chunks of a small model."""

_TOLERANCE = 1e-9
"""The tolerance of a comparison in float64, relative to the largest expected element."""

_LEAST_SCALE = 1e-6
"""The smallest scale of a gradient's tolerance, relative to the largest of all gradients: a
gradient that is smaller consists of rounding errors."""


@cache
def known_code() -> dict[str, list[str]]:
    """Return the hashes in `KNOWN`, by class in `transformers.models` or by function."""
    lines = (line.split() for line in KNOWN.read_text().splitlines() if line[:1] not in ("", "#"))
    return {name: hashes for name, *hashes in lines}


def check_code(model: nn.Module, *, allow_unchecked: bool = False) -> None:
    """Raise ValueError if ISP's own code may differ from the code of the model that it replaces.

    Code that is not in `KNOWN` is compared in a small copy of the model, which takes some seconds,
    once per process. If the comparison cannot run, also raises ValueError, or only warns with
    `allow_unchecked`. See [Note: Known code].
    """
    unknown = unknown_code(model)
    if not unknown:
        return
    from transformers import __version__

    about = f"{', '.join(unknown)} (transformers {__version__}) is not code that isp knows"
    way_out = (
        "register a forward of your own for the class with isp.register_mixer; isp check shows what"
        " differs"
    )
    if not __version__.startswith(NEWEST_TRANSFORMERS):
        way_out = f"use transformers {NEWEST_TRANSFORMERS}, or {way_out}"
    try:
        if not isinstance(interface_of(model), HuggingFace):
            raise ValueError(
                f"{type(model).__name__} has no configuration of transformers, from which isp makes"
                f" the small copy that it compares"
            )
        config: Any = model.config
        _compare(_Case(unknown, str(config.to_json_string(use_diff=False)), config, about))
    except _DiffersError as error:
        raise ValueError(f"{about}, and {error}: {way_out}") from error
    except Exception as error:  # unknown code may raise anything
        reason = " ".join(str(error).split())
        if not allow_unchecked:
            raise ValueError(
                f"{about}, and {reason}: {way_out}; or set model.allow_unchecked: true"
            ) from error
        logger.warning("%s, and could not be compared with code that it knows: %s", about, reason)


class _DiffersError(ValueError):
    """Raised if ISP's own code gives other results than the model's code that it replaces."""


# -- sources -----------------------------------------------------------------------------------


def unknown_code(model: nn.Module) -> tuple[str, ...]:
    """Return the full names of classes and functions of a model that ISP replaces without knowing
    their code."""
    replaced = dict.fromkeys(replaced_code(model))
    return tuple(f"{space}.{name}" for space, name in replaced if not _is_known(space, name))


@cache
def _is_known(space: str, name: str) -> bool:
    """Return whether `KNOWN` has the code of the class or function `name` in a Python module.

    `space`: the name of the Python module.
    """
    try:
        text = inspect.getsource(sys.modules[space])
    except (KeyError, OSError, TypeError):
        # There is no source file, or the Python module is not in `sys.modules`.
        return False
    found = source_hash(text, name)
    # transformers copies these functions from file to file, so any known copy will do. `found` is
    # None if this file imports the function.
    if name in FREE_FUNCTIONS:
        return found in (None, *known_code()[name])
    return found in known_code().get(f"{space}.{name}".removeprefix(PLACE), ())


def source_hash(text: str, name: str) -> str | None:
    """Return a hash of a class or function in the `text` of a module; None if it is not defined.

    The hash covers `name` and everything in the module that its code names, directly or indirectly.
    Comments, docstrings, texts of f-strings and formatting do not count, so that all versions of
    Python give the same hash.
    """
    definitions, found, left = _definitions(text), dict[str, Any](), [name]
    if name not in definitions:
        return None
    while left:
        if (one := left.pop()) in definitions and one not in found:
            found[one] = [_plain(node) for node in definitions[one]]
            nodes = (node for part in definitions[one] for node in ast.walk(part))
            left += [node.id for node in nodes if isinstance(node, ast.Name)]
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:12]


# The classes of one file are looked up one after the other, so two texts suffice.
@lru_cache(maxsize=2)
def _definitions(text: str) -> dict[str, list[ast.stmt]]:
    """Return by name the statements at the top level of a module's `text` that define the name."""
    found = defaultdict[str, list[ast.stmt]](list)
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name].append(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id].append(node)
    return dict(found)


def _plain(node: Any) -> Any:
    """Return a syntax tree as nested lists, the same in all versions of Python.

    Empty fields are left out, because newer versions have more of them.
    """
    if isinstance(node, ast.JoinedStr):
        # Versions of Python parse f-strings differently, so leave out what they contain.
        return "f-string"
    if isinstance(node, ast.AST):
        fields = ((n, _plain(x)) for n, x in ast.iter_fields(node) if x is not None and x != [])
        return [type(node).__name__, *fields]
    if isinstance(node, list):
        return [_plain(x) for x in node if not _is_text(x)]
    return repr(node)


def _is_text(node: Any) -> bool:
    """Return whether a statement is a docstring, or another constant without effect."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


# -- a comparison ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """A comparison to run with a model whose code ISP does not know.

    Cases with the same code and configuration are equal, so only one of them is run.
    """

    names: tuple[str, ...]
    """The names of the classes and functions that ISP does not know."""
    settings: str
    """The configuration of the model as JSON."""
    config: Any = field(compare=False)
    """The configuration of the model."""
    about: str = field(compare=False)
    """The beginning of each message about the unknown code."""


# Cached, so that each case is compared once per process.
@cache
def _compare(case: _Case) -> None:
    """Compare a small copy of the model with the same copy run by ISP; log that they are equal.

    ISP runs it on one rank. Raises `_DiffersError` if the results differ, ValueError if the copy
    lacks one of the unknown classes, and any error of the model's own code.
    """
    began = time.monotonic()
    level = logging.root.manager.disable
    # Warnings about the small model would be repeated for the real one.
    logging.disable(logging.WARNING)
    try:
        # Make all tensors on the CPU, even if the caller has set another default device.
        cpu = torch.device("cpu")
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), cpu:
            torch.default_generator.manual_seed(0)
            small = tiny_model(case.config)
            if missing := [name for name in case.names if name not in unknown_code(small)]:
                raise ValueError(f"a small copy of the model has no {missing[0]}")
            if differs := _difference(small):
                said = f"a small copy of the model has other {differs} with isp's code"
                raise _DiffersError(said)
    finally:
        logging.disable(level)
    if is_first_rank():
        logger.info(
            "%s, but a small copy of the model gives the same logits and gradients with isp's code"
            " (%.1f s)",
            case.about,
            time.monotonic() - began,
        )


def local_layers() -> RankLayers:
    """Return the layers of one rank without a process group, in float64 on the CPU."""
    return RankLayers(
        mode=Mode.ISP,
        tensor=Channel.solo("tensor"),
        weight=Channel.solo("weight"),
        communicator=LocalWeights(),
        device=torch.device("cpu"),
        dtype=torch.float64,
    )


def _difference(small: Any) -> str:
    """Return what differs between the model alone and run by ISP, in words; empty if nothing does.

    `small`: a model in float64, which ISP shards in place.
    """
    plain = copy.deepcopy(small)
    plain.set_attn_implementation("eager")
    plain.set_experts_implementation("eager")
    interface = interface_of(plain)
    (chunk,) = TracedModel(small, allow_unchecked=True).build(local_layers())
    ids = torch.randint(3, min(chunk.vocab_size, 150), (1, sum(_LENGTHS)))
    positions = [torch.arange(n)[None] for n in _LENGTHS]
    parts = zip(ids.split(_LENGTHS, 1), positions, strict=True)
    expected = torch.cat([interface.forward(plain, *part) for part in parts], 1)
    ends = torch.tensor([0, *_LENGTHS]).cumsum(0).to(torch.int32)
    # The plain model runs each document alone, ISP runs both packed into one sequence.
    logits = chunk.logits(chunk(ids, torch.cat(positions, 1), ends))
    if _apart(logits, expected):
        return "logits"
    weights = torch.randn_like(expected)
    for found in (logits, expected):
        (found * weights).sum().backward()
    of_plain = {name: _gradient(p) for name, p in plain.named_parameters()}
    least = _LEAST_SCALE * max(_largest(x) for x in of_plain.values())
    # Fused linears (q, k and v) have one parameter and one gradient in ISP, three in the model.
    for whole, members in by_whole(chunk.shards()).items():
        gradient = torch.cat([of_plain[item.name] for item in members])
        if _apart(_gradient(whole.parameter), gradient, least):
            return f"gradients ({whole.name})"
    return ""


def _gradient(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter; zeros if it has none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _largest(x: Tensor) -> float:
    """Return the largest absolute value; 0 for an empty tensor."""
    return x.detach().abs().max().item() if x.numel() else 0.0


def _apart(found: Tensor, expected: Tensor, least: float = 0.0) -> bool:
    """Return whether `found` differs from `expected` by more than the tolerance, or has NaN.

    `least`: the smallest scale to which the tolerance is relative.
    """
    largest = max(_largest(expected), least)
    # With `not`, a comparison with NaN counts as a difference.
    return not _largest(found - expected) <= _TOLERANCE * largest

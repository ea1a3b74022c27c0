"""The reference for all layouts: a step of the plain model, unsharded, one document at a time.

R rows, S sequence, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh.layout import ParameterLayout
from isp.core.micro_batch import MicroBatch
from isp.core.optim.config import MuonConfig, OptimizerConfig
from isp.core.optim.matrices import Matrix, matrices_of
from isp.core.optim.update_rules import group_values
from isp.models.runtime.stage_module import StageModule
from isp.parity.subjects import Subject

__all__ = [
    "GlobalBatch",
    "Outputs",
    "Reference",
    "make_reference",
    "make_rows",
    "modules_of",
    "orthogonal",
]


class GlobalBatch(NamedTuple):
    """The global batch of a step, as rows of documents."""

    tokens: Tensor
    """Token ids [R, S]."""
    labels: Tensor
    """Labels [R, S]; `IGNORED` where there is nothing to predict."""
    lengths: tuple[tuple[int, ...], ...]
    """For each row, the lengths of its documents in tokens."""

    def micro_batches(self, first: int, count: int, *, packed: bool) -> list[MicroBatch]:
        """Return rows `first` to `first + count` as one micro-batch, or as two if `packed`.

        A single packed row is one micro-batch.
        """
        if not packed:
            part = slice(first, first + count)
            positions = torch.arange(self.tokens.shape[1]).expand(count, -1)
            return [MicroBatch(self.tokens[part], self.labels[part], positions, None)]
        ends = sorted({first + count // 2, first + count} - {first})
        return [self._packed(a, b) for a, b in zip([first, *ends], ends, strict=False)]

    def _packed(self, start: int, stop: int) -> MicroBatch:
        """Return rows `start` to `stop` as one packed sequence [1, n S]."""
        lengths = [length for of_row in self.lengths[start:stop] for length in of_row]
        return MicroBatch(
            self.tokens[start:stop].reshape(1, -1),
            self.labels[start:stop].reshape(1, -1),
            # Positions restart at each document; the bounds are 0 and the end of each document.
            torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
            F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32),
        )


def make_rows(rows: int, length: int, vocab_size: int, *, packed: bool) -> GlobalBatch:
    """Return `rows` rows of `length` random tokens, each one document, or several if `packed`.

    Packed documents have unequal lengths, and one has a single token. A tenth of the labels is
    missing at random, so that ranks have different numbers of labels.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, vocab_size, (rows, length), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[torch.rand(rows, length, generator=generator) < 0.1] = IGNORED
    labels[:, -1] = IGNORED
    lengths = []
    for row in range(rows):
        ends = [length]
        if packed:
            cuts = (torch.randperm(length - 2, generator=generator)[:2] + 2).tolist()
            ends = sorted({1, *cuts, length} if row == 0 else {*cuts, length})
        # The last token of a document has no next one to predict.
        labels[row, [end - 1 for end in ends]] = IGNORED
        lengths.append(tuple(b - a for a, b in zip([0, *ends], ends, strict=False)))
    return GlobalBatch(tokens, labels, tuple(lengths))


class Reference(NamedTuple):
    """Results of a step of the plain model, which layouts are compared with."""

    rows: GlobalBatch
    loss: float
    grad_norm: float
    start: dict[str, Tensor]
    """The weights before the step, by name."""
    gradients: dict[str, Tensor]
    """Gradients before clipping, by name."""
    weights: dict[str, Tensor]
    """Weights after the step, by name."""
    outputs: dict[str, Tensor]
    """Outputs [R, S, ..] by name of the module, in the order of the forward. Modules are left out
    whose outputs do not have exactly one entry for each token."""


def make_reference(
    subject: Subject,
    rows: GlobalBatch,
    optimizer: OptimizerConfig,
    max_norm: float,
    layouts: Mapping[str, ParameterLayout],
) -> Reference:
    """Train a step of the plain model, one document at a time, and return its results.

    The update is that of torch's AdamW, and for Muon its formula. `layouts` has the trained
    parameters of the whole model.
    """
    plain = subject.plain()
    parameters = dict(plain.named_parameters())  # yields a shared parameter once
    start = {name: p.detach().clone() for name, p in parameters.items()}
    valid = int((rows.labels != IGNORED).sum())
    outputs = Outputs()
    total = torch.zeros((), dtype=torch.float64)
    with outputs.of(dict(plain.named_modules())):
        for row, lengths in enumerate(rows.lengths):
            end = 0
            for length in lengths:
                part = (slice(row, row + 1), slice(end, end + length))
                logits = subject.logits(plain, rows.tokens[part], torch.arange(length)[None])
                labels = rows.labels[part].flatten()
                loss = F.cross_entropy(
                    logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum"
                )
                (loss / valid).backward()
                total += loss.detach() / valid
                end += length
    # A weight that is not in `layouts` is not trained by a run, so it should have no gradient. If
    # it has one, include it: the comparison then fails.
    trained = {
        name: p
        for name, p in parameters.items()
        if p.requires_grad and (name in layouts or p.grad is not None)
    }
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in trained.items()
    }
    return Reference(
        rows=rows,
        loss=total.item(),
        grad_norm=math.sqrt(sum(g.square().sum().item() for g in gradients.values())),
        start=start,
        gradients=gradients,
        weights=_updated(trained, optimizer, max_norm, layouts, _decayed(plain)),
        outputs=outputs.as_rows(len(rows.tokens), rows.tokens.shape[1]),
    )


def _updated(
    parameters: dict[str, nn.Parameter],
    config: OptimizerConfig,
    max_norm: float,
    layouts: Mapping[str, ParameterLayout],
    decayed: Collection[str],
) -> dict[str, Tensor]:
    """Return the weights after a step of torch's AdamW, and of Muon for those it updates.

    `decayed` has the names of weights with weight decay.
    """
    groups, moved = [], {}
    for name, parameter in parameters.items():
        known = layouts[name].matrices if name in layouts else None
        # Do not use the run's own `decays`: `decayed` is independent, so that mistakes in it show.
        values = group_values(name, config, decays=name in decayed, matrices=known)
        rate = config.lr * values.lr_scale
        groups.append({"params": [parameter], "lr": rate, "weight_decay": values.weight_decay})
        if values.rule == "muon" and parameter.grad is not None:
            moved[name] = rate
    if max_norm:
        torch.nn.utils.clip_grad_norm_(parameters.values(), max_norm)
    updates = {}
    for name, rate in moved.items():
        parameter, matrices = parameters[name], matrices_of(name, layouts[name], config)
        assert parameter.grad is not None
        updates[name] = rate * _orthogonal(parameter.grad, matrices, config.muon)
        # AdamW decays weights as Muon does. With a zero gradient that is all it does.
        parameter.grad.zero_()
    betas = config.of_adamw("beta1"), config.of_adamw("beta2")
    torch.optim.AdamW(groups, betas=betas, eps=config.of_adamw("eps")).step()
    return {name: p.detach() - updates.get(name, 0.0) for name, p in parameters.items()}


def _decayed(model: nn.Module) -> set[str]:
    """Return the names of the weights that should have weight decay: no vectors, biases or norms.

    The check has to find mistakes of a run in this choice, so it uses no code of the run. For a
    model of transformers the choice is that of transformers' Trainer.
    """
    if hasattr(model, "set_attn_implementation"):
        from transformers.trainer import Trainer

        of_trainer: Any = Trainer.get_decay_parameter_names
        names = set(of_trainer(None, model))  # the method does not read `self`
    else:
        names = {name for name, _ in model.named_parameters() if not _is_norm_or_bias(name)}
    of_norms = {
        f"{prefix}.{local}"
        for prefix, module in model.named_modules()
        for local, _ in module.named_parameters(recurse=False)
        if type(module).__name__.endswith("Norm")
    }
    return {n for n, p in model.named_parameters() if n in names - of_norms and p.dim() > 1}


def _is_norm_or_bias(name: str) -> bool:
    """Return True if a parameter is a bias or belongs to a norm, judged by its name."""
    parts = name.lower().split(".")
    words = any(word in name.lower() for word in ("bias", "layernorm", "rmsnorm"))
    return words or any(part == "norm" or part.endswith("_norm") for part in parts)


def _orthogonal(gradient: Tensor, matrices: Sequence[Matrix], keys: MuonConfig) -> Tensor:
    """Return Muon's first update for a gradient, at learning rate 1.

    A parameter may consist of several `matrices`, each orthogonalized alone. They stay in their own
    dtype, while `torch.optim.Muon` would use bfloat16.
    """
    found, update = torch.empty_like(gradient), (1 - keys.momentum) * gradient
    if keys.nesterov:
        update = keys.momentum * update + (1 - keys.momentum) * gradient
    for matrix in matrices:
        pairs = zip(matrix.offsets, matrix.sizes, strict=True)
        place = tuple(slice(start, start + size) for start, size in pairs)
        x = orthogonal(update[place].reshape(matrix.sizes[-2:]), keys)
        found[place] = matrix.ratio(keys) * x.view(matrix.sizes)
    return found


def orthogonal(u: Tensor, keys: MuonConfig) -> Tensor:
    """Orthogonalize a matrix [A, B] by Newton-Schulz steps as `torch.optim.Muon`, in its dtype.

    Each step is x -> a x + (b G + c G^2) x with G = x x^T.
    """
    a, b, c = keys.ns_coefficients
    x = u / max(u.square().sum().sqrt().item(), keys.eps)
    for _ in range(keys.ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def modules_of(chunks: Iterable[StageModule]) -> dict[str, nn.Module]:
    """Return all modules of a rank's model chunks, by their names in the whole model."""
    return {
        f"{name}.{below}" if below else name: module
        for chunk in chunks
        for name, part in chunk.parts().items()
        for below, module in part.named_modules()
    }


class Outputs:
    """Records outputs of modules, by name, in the order of their calls."""

    def __init__(self) -> None:
        self._found: dict[str, list[Tensor]] = {}

    @contextmanager
    def of(self, modules: dict[str, nn.Module]) -> Iterator[None]:
        """Context in which outputs of `modules` are recorded."""
        hooks = [m.register_forward_hook(self._noting(name)) for name, m in modules.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self) -> dict[str, list[Tensor]]:
        """Return and clear the outputs recorded so far, by module."""
        found, self._found = self._found, {}
        return found

    def as_rows(self, rows: int, length: int) -> dict[str, Tensor]:
        """Return and clear the recorded outputs, joined to [R, S, ..], by name of the module.

        Each was recorded for one document, as [1, n, ..]. Modules that did not have each token
        exactly once are left out.
        """
        joined = {}
        for name, parts in self.take().items():
            same_shape = {part.shape[:1] + part.shape[2:] for part in parts} == {
                (1, *parts[0].shape[2:])
            }
            if same_shape and sum(part.shape[1] for part in parts) == rows * length:
                joined[name] = torch.cat(parts, 1).view(rows, length, *parts[0].shape[2:])
        return joined

    def _noting(self, name: str) -> Callable[..., None]:
        """Return a forward hook that records outputs of module `name`."""

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            # Modules of transformers may return a tuple, whose first item is the hidden states.
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor) and first.dim() >= 3:
                # Clone: the loss overwrites logits in place.
                self._found.setdefault(name, []).append(first.detach().clone())

        return note

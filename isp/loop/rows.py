"""`RowReader`: checks a caller's rows of tokens and turns them into a `MicroBatch`.

B batch, S sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import ParallelConfig
from isp.core.micro_batch import MicroBatch, document_bounds
from isp.models.traced_model import TracedModel

__all__ = ["RowReader", "check_tensors"]


class RowReader:
    """Reads rows [B, S] for a model whose ranks may split a sequence."""

    def __init__(self, traced: TracedModel, parallel: ParallelConfig, device: torch.device) -> None:
        self.traced = traced
        self.device = device
        """Device of the micro-batches."""
        self.logits_of = traced.interface.logits_of(traced.model)
        """The meaning of the model's logits: vocabulary entries, labels of tokens, or of rows."""
        self._parallel = parallel
        self._ranks = parallel.tensor.size
        """Number of ranks that split a sequence; it divides S."""

    def read(
        self,
        input_ids: Tensor,
        labels: Tensor | None,
        position_ids: Tensor | None,
        *,
        skip_first: bool = False,
        alone: Tensor | None = None,
    ) -> MicroBatch:
        """Return a micro-batch of whole rows, with labels shifted to the tokens that predict them.

        A document begins where positions do not increase by 1. `skip_first` ignores the label of
        each document's first token; so does `labels` None. `alone` [B, S] marks tokens that are
        each a separate document, whatever their positions. Raises TypeError for arguments that are
        not integer tensors, and ValueError for shapes, ids and labels that do not fit.
        """
        check_tensors(input_ids=input_ids, labels=labels, position_ids=position_ids)
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must be [batch, sequence], got {list(input_ids.shape)}")
        rows, length = input_ids.shape
        if not input_ids.numel():
            raise ValueError(f"input_ids of shape {list(input_ids.shape)} have no tokens")
        if length % self._ranks:
            raise ValueError(
                f"sequences of {length} tokens do not divide by parallel.tensor.size={self._ranks}:"
                f" pad them to {-(-length // self._ranks) * self._ranks}, with labels of {IGNORED}"
            )
        if position_ids is None:
            position_ids = torch.arange(length).expand(rows, length)
        _check_shapes(input_ids, labels=labels, position_ids=position_ids)
        _check_integers(input_ids=input_ids, labels=labels, position_ids=position_ids)
        input_ids, position_ids = input_ids.long(), position_ids.long()
        self.traced.check_length(self._parallel, length)
        begins = torch.ones_like(position_ids, dtype=torch.bool)
        begins[:, 1:] = position_ids.diff(dim=1) != 1
        if alone is not None:
            begins[:, 1:] |= (alone[:, 1:] | alone[:, :-1]).to(begins.device)
        if labels is None:
            labels, skip_first = input_ids, True
        labels = labels.long()
        if skip_first:
            labels = labels.masked_fill(begins.to(labels.device), IGNORED)
        self._check_values(input_ids, labels)
        targets = torch.full_like(labels, IGNORED)
        targets[:, :-1] = labels[:, 1:]
        # A common mistake is an attention_mask as the third argument. Two consecutive positions of
        # 1 are in masks, but never in documents.
        again = (position_ids[:, 1:] == 1) & (position_ids[:, :-1] == 1)
        is_mask = (position_ids <= 1).all() & again.any()
        # Copy `begins` and `is_mask` to the host in one tensor, because the host waits for each
        # copy from a device.
        begin_flags, mask_flag = (
            torch.cat((begins.flatten(), is_mask[None])).cpu().split([begins.numel(), 1])
        )
        if mask_flag:
            raise ValueError(
                "position_ids are 1 again and again, as an attention_mask is: pass a mask by name,"
                " attention_mask=.., to run.log_probs, run.logits or run.hidden"
            )
        cu_seqlens = document_bounds(begin_flags)
        return MicroBatch(input_ids, targets, position_ids, cu_seqlens).to(self.device)

    def read_padded(
        self,
        input_ids: Tensor,
        labels: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
    ) -> MicroBatch:
        """Read rows of any length as `read` does with `skip_first`, padded for the ranks.

        Each token that `attention_mask` [B, S] masks is a separate document without a label.
        Raises what `read` raises, and ValueError for a mask that masks tokens inside a document.
        """
        others = {"labels": labels, "position_ids": position_ids, "attention_mask": attention_mask}
        check_tensors(input_ids=input_ids, **others)
        length = input_ids.shape[-1]
        if attention_mask is None and length % self._ranks == 0:
            return self.read(input_ids, labels, position_ids, skip_first=True)
        _check_shapes(input_ids, **others)
        _check_integers(input_ids=input_ids, labels=labels, position_ids=position_ids)
        seen = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            seen = attention_mask.to(input_ids.device).bool()
        if position_ids is None:
            position_ids = seen.long().cumsum(-1) - 1
        position_ids = position_ids.to(input_ids.device).masked_fill(~seen, 0)
        # `again` marks the first token after masked tokens in the middle of a sequence. Such a gap
        # is allowed only between documents, so a document must begin at this token.
        again = seen[:, 1:] & ~seen[:, :-1] & (seen.cumsum(-1)[:, :-1] > 0)
        if (again & (position_ids[:, 1:] != 0)).any():
            raise ValueError(
                "attention_mask masks tokens inside a document: mask only padding, at either end"
                " of a sequence or, with position_ids, between documents"
            )
        labels = (input_ids if labels is None else labels).masked_fill(~seen, IGNORED)
        more = (0, -length % self._ranks)
        return self.read(
            F.pad(input_ids, more),
            F.pad(labels, more, value=IGNORED),
            F.pad(position_ids, more).cpu(),
            skip_first=True,
            alone=F.pad(~seen, more, value=True),
        )

    def _check_values(self, input_ids: Tensor, labels: Tensor) -> None:
        """Raise ValueError for an id without an embedding, and for a label that is no token."""
        vocab_rows, vocab_size = self.traced.vocab_rows, self.traced.vocab_size
        # Both results in one copy, so that the host waits only once for ids on a device.
        wrong = (input_ids < 0) | (input_ids >= vocab_rows)
        foreign = (labels != IGNORED) & ((labels < 0) | (labels >= vocab_size))
        if wrong.device == foreign.device:
            found = torch.stack((wrong.any(), foreign.any())).tolist()
        else:
            found = [bool(wrong.any()), bool(foreign.any())]
        if found[0]:
            raise ValueError(
                f"input_ids has {input_ids[wrong][0].item()}: the model has embeddings for tokens"
                f" from 0 to {vocab_rows - 1}; use its own tokenizer, or resize its embeddings"
                f" before isp.parallelize"
            )
        if found[1]:
            raise ValueError(
                f"labels has {labels[foreign][0].item()}: use tokens below {vocab_size}, or"
                f" {IGNORED} for positions without loss"
            )


def check_tensors(**given: Tensor | None) -> None:
    """Raise TypeError for an argument that is neither None nor a tensor."""
    for name, x in given.items():
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(
                f"{name} is a {type(x).__name__}: pass a tensor of integers, [batch, sequence]"
            )


def _check_integers(**given: Tensor | None) -> None:
    """Raise TypeError for token ids and positions that are not integers."""
    for name, x in given.items():
        if x is not None and (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool):
            raise TypeError(f"{name} has dtype {x.dtype}: pass integers (torch.long)")


def _check_shapes(input_ids: Tensor, **given: Tensor | None) -> None:
    """Raise ValueError for an argument whose shape is not that of `input_ids`."""
    for name, tensor in given.items():
        if tensor is not None and tensor.shape != input_ids.shape:
            raise ValueError(
                f"{name} must have the shape of input_ids, {list(input_ids.shape)}, got"
                f" {list(tensor.shape)}"
            )

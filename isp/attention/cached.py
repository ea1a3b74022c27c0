"""What is kept of earlier tokens for the next ones: the cache of generation.

n documents (prompts and what follows them), C tokens that a layer keeps of each, H query heads and
K KV heads of this rank, G = H / K, d head size, L tokens of the longest document, at most C

    prefill   q, k, v [1, S, .., d] of packed prompts: attended to as in training; k, v are kept
    decode    q, k, v [1, n, .., d], a token of each document: k, v are added, q sees all there is

A layer with a window keeps that many tokens, in a ring: its query sees all of it, in any order, as
rotary positions are in the keys already. So no mask but that of documents that are shorter than
the longest is ever needed. Of convolutions and scans the state behind each document is kept, of
indexers the index keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.attention.local import LocalAttention
from isp.attention.mask import AttentionMask, Chosen, seen_by
from isp.comm import host_memory

__all__ = ["CachedAttention", "KeyValueCache"]


class KeyValueCache:
    """Keys and values, index keys or states of what mixes a rank's tokens, in order of calls.

    Made with a model; each `prefill` begins anew. Outside of `prefill` and `decode` layers are as
    if there were none.
    """

    def __init__(self) -> None:
        self.lengths: tuple[int, ...] = ()
        """Tokens of each document so far."""
        self.capacity = 0
        """Tokens that a document may come to have."""
        self._layers: list[_Layer | Tensor] = []
        """Of convolutions and scans, the states [n, H, ..]."""
        self._next = 0
        self._step: _Step | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of all layers."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def keeps(self) -> bool:
        """Whether this is a forward of which something is kept."""
        return self._step is not None

    @property
    def decodes(self) -> bool:
        """Whether it is one over one more token of each document."""
        return self._step is not None and self._step.decodes

    @contextmanager
    def prefill(self, lengths: Sequence[int], capacity: int) -> Iterator[None]:
        """In this context, a forward over packed documents of these lengths is kept.

        What is packed behind them is padding. Raises ValueError for an empty document, or one
        beyond `capacity`.
        """
        if not lengths or not 0 < min(lengths) <= max(lengths) <= capacity:
            raise ValueError(f"documents of {list(lengths)} tokens do not fit 1 to {capacity}")
        self._layers, self.lengths, self.capacity = [], tuple(lengths), capacity
        with self._during(_Step(self.lengths, decodes=False)):
            yield

    @contextmanager
    def decode(self) -> Iterator[None]:
        """In this context, a forward over one more token of each document sees what is kept.

        Raises ValueError if the cache is full.
        """
        if max(self.lengths, default=self.capacity) >= self.capacity:
            raise ValueError(f"the cache is full: its documents have up to {self.capacity} tokens")
        self.lengths = tuple(n + 1 for n in self.lengths)
        with self._during(_Step(self.lengths, decodes=True)):
            yield
            assert self._next == len(self._layers), "a layer was not called"

    @contextmanager
    def _during(self, step: _Step) -> Iterator[None]:
        self._step, self._next = step, 0
        try:
            yield
        finally:
            self._step = None

    def keep(
        self, k: Tensor, v: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Keep one layer's new keys and values, in a forward of which something is kept.

        While decoding, all that there are, [n, K, L, d], and which of them are tokens of the
        document, bool [n, 1, 1, L], None: all.
        """
        if self._step is None:
            return None
        layer = self._kept(self._step, k, v, window)
        if not self._step.decodes:
            return None
        return *layer.seen(self._step), self._step.mask(layer.size, k.device)

    def index_keys(self, keys: Tensor) -> list[Tensor]:
        """The index keys [L, D] of each document so far, with these of new tokens [1, S, D]."""
        assert self._step is not None
        k = keys.unsqueeze(2)
        layer = self._kept(self._step, k, k[..., :0], None)
        documents = zip(layer.k.unbind(), self.lengths, strict=True)
        return [document[0, :length] for document, length in documents]

    def _kept(self, step: _Step, k: Tensor, v: Tensor, window: int | None) -> _Layer:
        """The next layer, with new keys and values."""
        number = self._next
        self._next += 1
        if step.decodes:
            layer = self._layers[number]
            assert isinstance(layer, _Layer)
            layer.append(step, k, v)
        else:
            layer = _Layer(len(step.lengths), min(self.capacity, window or self.capacity), k, v)
            layer.fill(step.lengths, k, v)
            self._layers.append(layer)
        return layer

    def resume(self, scan: Callable[[Tensor | None], tuple[Tensor, Tensor]]) -> Tensor:
        """One layer's results of `scan`, which gives them and the states behind each document.

        It is given the states before them; None: zeros. Of padding behind the documents, too.
        """
        number, num = self._next, len(self.lengths)
        self._next += 1
        before = self._layers[number] if self.decodes else None
        assert not isinstance(before, _Layer)
        out, states = scan(before)
        self._layers[number : number + 1] = [states[:num]]
        return out


class CachedAttention:
    """`local` attention, joined to a cache: each call is the next layer's.

    While decoding it computes softmax(cap(scale q k^T)) v itself: one query to a document needs no
    blocks. `scale`, `softcap`: those of `local`.
    """

    def __init__(
        self,
        local: LocalAttention,
        cache: KeyValueCache,
        *,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        self._local = local
        self._cache = cache
        self._scale = scale
        self._softcap = softcap

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, **extras: Any
    ) -> Tensor:
        """q [1, S, H, d], k and v [1, S, K, d] -> [1, S, H, d]; `extras` as of `local`."""
        if not mask.causal:
            raise ValueError("only causal attention can resume from keys and values that were kept")
        seen = self._cache.keep(k, v, mask.window)
        if seen is None:
            return self._local(q, k, v, mask=mask, **extras)
        return self._see_all(q, *seen, **extras)

    def _see_all(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None = None,
        chosen: Chosen | None = None,
    ) -> Tensor:
        """q [1, n.., H, d], k and v [n, K, L, d], mask [n, 1, 1, L] -> [1, n.., H, d].

        Tokens of q beyond the n documents are padding, and give zeros.
        """
        num, kv_heads, length, _ = k.shape
        if chosen is not None:
            seen = seen_by(chosen.numbers[0, :num], chosen.run, length).permute(2, 0, 1, 3)
            mask = seen if mask is None else mask & seen  # [n, G, 1, L]
        grouped = q[0, :num].unflatten(1, (kv_heads, -1))  # [n, K, G, d]: no key is repeated
        if self._softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=self._scale)
        else:
            out = self._explicitly(grouped, k, v, mask, sinks)
        out = out.reshape(1, num, *q.shape[2:])
        return out if num == q.shape[1] else F.pad(out, (0, 0, 0, 0, 0, q.shape[1] - num))

    def _explicitly(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        """As `isp.attention.explicit`, of [n, K, G, d]."""
        wide = torch.promote_types(q.dtype, torch.float32)
        scale = q.shape[-1] ** -0.5 if self._scale is None else self._scale
        logits = q.to(wide) @ k.to(wide).mT * scale  # [n, K, G, L]
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            column = sinks.to(wide).view(1, k.shape[1], -1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, column], -1)
        return (logits.softmax(-1)[..., : k.shape[2]] @ v.to(wide)).to(q.dtype)


class _Step:
    """A forward whose keys are kept, in layers that keep so many tokens; one for all of them."""

    def __init__(self, lengths: tuple[int, ...], *, decodes: bool) -> None:
        self.lengths = lengths
        """With the tokens of this step."""
        self.decodes = decodes
        self._places: dict[int, int | tuple[Tensor, Tensor]] = {}
        self._masks: dict[int, Tensor | None] = {}

    def longest(self, size: int) -> int:
        return min(max(self.lengths), size)

    def places(self, size: int, device: torch.device) -> int | tuple[Tensor, Tensor]:
        """The place of each document's new token, as an index [n] beside that of the document.

        One number where all have the same.
        """
        if size not in self._places:
            places = [(length - 1) % size for length in self.lengths]
            if len(set(places)) == 1:
                self._places[size] = places[0]
            else:
                index = host_memory.send(torch.tensor(places), device)
                self._places[size] = torch.arange(len(places), device=device), index
        return self._places[size]

    def mask(self, size: int, device: torch.device) -> Tensor | None:
        """The places that hold tokens, bool [n, 1, 1, L]; None where all do."""
        if size not in self._masks:
            counts, longest = [min(length, size) for length in self.lengths], self.longest(size)
            mask = None
            if min(counts) < longest:
                ends = host_memory.send(torch.tensor(counts), device)
                mask = torch.arange(longest, device=device) < ends.view(-1, 1, 1, 1)
            self._masks[size] = mask
        return self._masks[size]


class _Layer:
    """Keys and values [n, K, C, d] of one layer; token t of a document lies at t mod C."""

    def __init__(self, num: int, size: int, k: Tensor, v: Tensor) -> None:
        self.size = size
        self.k, self.v = (x.new_zeros(num, x.shape[2], size, x.shape[3]) for x in (k, v))

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def fill(self, lengths: tuple[int, ...], k: Tensor, v: Tensor) -> None:
        """Keep the last tokens of documents packed in k and v [1, S, K, d]."""
        for kept, new in ((self.k, k), (self.v, v)):
            end = 0
            for document, length in enumerate(lengths):
                end, count = end + length, min(length, self.size)
                own = new[0, end - count : end].transpose(0, 1)  # [K, count, d]
                first = (length - count) % self.size
                kept[document, :, first:count] = own[:, : count - first]
                kept[document, :, :first] = own[:, count - first :]

    def append(self, step: _Step, k: Tensor, v: Tensor) -> None:
        """Put a token of each document, k and v [1, n.., K, d], in its place."""
        places, num = step.places(self.size, k.device), self.k.shape[0]
        for kept, new in ((self.k, k), (self.v, v)):
            if isinstance(places, int):
                kept[:, :, places] = new[0, :num]
            else:
                documents, index = places
                kept[documents, :, index] = new[0, :num]

    def seen(self, step: _Step) -> tuple[Tensor, Tensor]:
        """What there is, [n, K, L, d]."""
        longest = step.longest(self.size)
        return self.k[:, :, :longest], self.v[:, :, :longest]

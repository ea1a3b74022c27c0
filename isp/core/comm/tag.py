"""Transfers in words: what they carry (`Tag`), how much (`Transfer`), and which one failed."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

__all__ = [
    "BETWEEN_TWO",
    "UNNAMED",
    "CollectiveCall",
    "CollectiveError",
    "Purpose",
    "Tag",
    "Transfer",
]

BETWEEN_TWO = ("send", "recv")
"""Kinds of transfers between two ranks, not all that the channel has."""


class Purpose(StrEnum):
    """The kind of tag, hence what could be computed meanwhile; said by its launcher."""

    WEIGHT = "weights"
    """A full weight or bias, gathered to be read."""
    WEIGHT_GRADIENT = "weight gradients"
    """The same of a gradient, summed over the ranks that share the weights."""
    REPLICA_GRADIENT = "gradients of replicas"
    PUBLISHED_WEIGHT = "updated weights"
    """The rows that other ranks have updated."""
    MATRIX = "matrices to update"
    """Rows of momentum on their way to whole matrices, and of what came of these."""
    ACTIVATION = "activations"
    """The input or output of a layer, or both ways what a mapping makes of it."""
    REGATHERED_ACTIVATION = "activations, gathered again"
    """The input of a layer in backward, beside the gradient of the input."""
    OUTPUT_GRADIENT = "gradients of outputs"
    INPUT_GRADIENT = "gradients of inputs"
    """Beside which the gradient of the weight is computed."""
    HEADS = "heads"
    """Sequence exchanged for heads, around attention, and their gradients."""
    SCAN_HEADS = "heads of scans"
    """The same around a scan."""
    EXPERTS = "tokens of experts"
    """Sent to the experts that they are routed to, and back, and their gradients."""
    KEYS = "keys and values"
    """Those that a context rank attends to and others have, and their gradients."""
    HALO = "halos"
    """Tokens before a rank's slices, for a convolution, and their gradients."""
    STATES = "states"
    """Those of a scan before a rank's slices, and their gradients."""
    LOGITS = "logits"
    """And their gradients."""
    LOSS = "loss"
    """The parts of a loss over a vocabulary that is split."""
    STAGE_ACTIVATION = "activations between stages"
    """And their gradients."""
    BLOCK_INPUT = "inputs of blocks"
    """Gathered from the ranks' parts for a recompute; or copied to the host, and back for it."""
    DATA = "data"
    CONTROL = "numbers"
    """Metrics, norms, and what ranks agree upon."""


class Tag(NamedTuple):
    """A transfer's load; its text is for people."""

    purpose: Purpose = Purpose.CONTROL
    layer: str = ""
    """The layer or parameter, by its path in the model; empty where it is none's alone."""
    tensor: str = ""
    """The tensor, such as `weight.grad`, or what it is."""

    def __str__(self) -> str:
        return ".".join(part for part in (self.layer, self.tensor) if part)


UNNAMED = Tag()
"""Numbers without a name."""


class Transfer(NamedTuple):
    """One transfer of a rank, as is known when it is launched."""

    kind: str
    """all_gather, reduce_scatter, all_to_all, all_reduce, broadcast, send, recv; or to_host and
    from_host, which no other rank sees."""
    channel: str
    """Name of the channel, which is the name of its mesh axis; `offload` to and from the host."""
    tag: Tag
    sent_bytes: int
    """Bytes that this rank has to send to others, by the collective's definition."""


class CollectiveCall(NamedTuple):
    """One collective of a group, or transfer between two of its ranks, for people."""

    kind: str
    """As in `Transfer`."""
    label: str
    """The tag."""
    channel: str
    ranks: list[int]
    """The group's, in the world; of a send or recv the sender and the receiver."""
    number: int
    """Of those that its channel has launched in the group; the same on all its ranks."""

    @property
    def group(self) -> str:
        """The group's name."""
        if self.kind in BETWEEN_TWO:
            return f"{self.channel} line from rank {self.ranks[0]} to rank {self.ranks[1]}"
        return f"{self.channel} group {self.ranks}"

    def __str__(self) -> str:
        of = f" of {self.label}" if self.label else ""
        return f"{self.kind}{of} in the {self.group} (number {self.number} there)"


class CollectiveError(RuntimeError):
    """A transfer failed: the backend's words, and which it was."""

    def __init__(self, collective: CollectiveCall, reason: str) -> None:
        super().__init__(f"{collective}: {reason}")
        self.collective = collective

"""Descriptions of transfers: contents (`Tag`), size (`Transfer`), and failures."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

__all__ = [
    "BETWEEN_TWO",
    "MAPPING",
    "UNNAMED",
    "CollectiveCall",
    "CollectiveError",
    "Purpose",
    "Tag",
    "Transfer",
]

BETWEEN_TWO = ("send", "recv")
"""Kinds of transfers between two ranks; all other kinds involve the whole group."""


class Purpose(StrEnum):
    """The purpose of a transfer, set at its launch; it decides which compute can overlap it."""

    WEIGHT = "weights"
    """A full weight or bias, gathered for a layer that reads it."""
    WEIGHT_GRADIENT = "weight gradients"
    """The gradient of a full weight or bias, reduced over the ranks that share the weight."""
    REPLICA_GRADIENT = "gradients of replicas"
    """The gradient of a rank's parameters, reduced over the ranks that hold replicas of them."""
    PUBLISHED_WEIGHT = "updated weights"
    """Rows of parameters, sent by the rank that has updated them."""
    MATRIX = "matrices to update"
    """Rows of momentum, gathered to whole matrices, and the rows of updates, sent back."""
    ACTIVATION = "activations"
    """The input or output of a layer; the tensor, or its gradient, of a Megatron-LM mapping."""
    REGATHERED_ACTIVATION = "activations, gathered again"
    """A layer's input, gathered in backward while the gradient of the input is computed."""
    OUTPUT_GRADIENT = "gradients of outputs"
    """The gradient of a layer's output, gathered before its backward."""
    INPUT_GRADIENT = "gradients of inputs"
    """The gradient of a layer's input, in flight while the weight's gradient is computed."""
    HEADS = "heads"
    """The exchange of tokens for heads before attention, back after it, and the gradients."""
    SCAN_HEADS = "heads of scans"
    """The exchange of tokens for heads before a scan, back after it, and the gradients."""
    EXPERTS = "tokens of experts"
    """Tokens sent to their experts, the results sent back, and the gradients of both."""
    KEYS = "keys and values"
    """Keys and values of other context ranks that a rank attends to, and their gradients."""
    HALO = "halos"
    """Tokens before a rank's slices of documents, for a convolution, and their gradients."""
    STATES = "states"
    """States of a scan before a rank's slices of documents, and their gradients."""
    LOGITS = "logits"
    """Logits and their gradients."""
    LOSS = "loss"
    """Partial results of a loss over a sharded vocabulary."""
    STAGE_ACTIVATION = "activations between stages"
    """Activations between pipeline stages, and their gradients."""
    BLOCK_INPUT = "inputs of blocks"
    """A block's input for recomputation, gathered, or copied to the host and back."""
    DATA = "data"
    """Token ids, labels and positions of batches."""
    CONTROL = "numbers"
    """Metrics, norms and decisions that the ranks agree on."""


class Tag(NamedTuple):
    """The contents of a transfer; its text is `layer.tensor`."""

    purpose: Purpose = Purpose.CONTROL
    layer: str = ""
    """Path of the layer or parameter in the model; empty if there are several or none."""
    tensor: str = ""
    """Name of the tensor, such as `weight.grad`, or a description of it."""

    def __str__(self) -> str:
        return ".".join(part for part in (self.layer, self.tensor) if part)


UNNAMED = Tag()
"""The default tag: control data without a name."""

MAPPING = Tag(Purpose.ACTIVATION, tensor="mapping")
"""The tag of Megatron-LM's mappings, such as `copy_to_tensor_model_parallel_region`."""


class Transfer(NamedTuple):
    """The properties of a rank's transfer that are known at its launch."""

    kind: str
    """all_gather, reduce_scatter, all_to_all, all_reduce, broadcast, send or recv; to_host or
    from_host for a rank's own copies between device and host memory."""
    channel: str
    """Name of the channel, usually the name of its axis; `offload` for copies between device and
    host memory."""
    tag: Tag
    sent_bytes: int
    """Bytes that this rank must send to other ranks, by the definition of the collective."""


class CollectiveCall(NamedTuple):
    """The identity of a collective, send or receive: equal on all its ranks, shown in errors."""

    kind: str
    """Kind as in `Transfer.kind`."""
    label: str
    """The tag as text: what the transfer contains."""
    channel: str
    """Name of the channel."""
    ranks: list[int]
    """World ranks of the group; sender and receiver for a send or recv."""
    number: int
    """Sequence number in `group`, from 1; the same on all its ranks."""

    @property
    def group(self) -> str:
        """Return the name of the group, or of the connection from sender to receiver."""
        if self.kind in BETWEEN_TWO:
            return f"{self.channel} line from rank {self.ranks[0]} to rank {self.ranks[1]}"
        return f"{self.channel} group {self.ranks}"

    def __str__(self) -> str:
        of = f" of {self.label}" if self.label else ""
        return f"{self.kind}{of} in the {self.group} (number {self.number} there)"


class CollectiveError(RuntimeError):
    """A failed transfer: the text names it and repeats the backend's error."""

    def __init__(self, collective: CollectiveCall, reason: str) -> None:
        super().__init__(f"{collective}: {reason}")
        self.collective = collective

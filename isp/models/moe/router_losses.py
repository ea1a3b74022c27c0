"""The load-balancing loss and the z-loss of routers, whose gradients are added in backward.

No autograd graph leads from the routers to these losses. See [Note: Gradients of router losses] in
docs/design/notes/experts.md.

N tokens that a router is called with, E experts, k experts of each token
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isp.core.autograd import Function, once_differentiable
from isp.core.comm import Channel
from isp.core.comm.tag import Purpose, Tag
from isp.core.layers.compiled import widened
from isp.core.torch_private import tree_flatten, tree_unflatten
from isp.models.huggingface.interface import RouterCoefficients
from isp.models.moe.load_balance import check_bias_update

__all__ = ["RouterLosses", "check_router_losses", "make_router_losses"]


def _find_routers(model: Any) -> list[tuple[nn.Module, int]]:
    """Return the routers that a model of transformers declares, for its own router losses.

    Each router comes with the index of the logits [N, E] in its output. Raises ValueError for a
    model that declares none.
    """
    # Each class of models in transformers lists the modules whose outputs it records.
    kinds = [getattr(part, "_can_record_outputs", None) or {} for part in model.modules()]
    found: list[tuple[nn.Module, int]] = []
    recorders = {id(r): r for kind in kinds if (r := kind.get("router_logits")) is not None}
    for recorder in recorders.values():
        if isinstance(recorder, list) or not hasattr(recorder, "target_class"):
            # This declaration does not name one class, so routers cannot be found by it.
            break
        found += [
            (part, recorder.index)
            for name, part in model.named_modules()
            if isinstance(part, recorder.target_class)
            and (recorder.layer_name is None or recorder.layer_name in name)
        ]
    if not found:
        raise ValueError(
            f"transformers does not record router logits of {type(model).__name__}: leave out"
            f" model.router_aux_loss_coef, model.router_z_loss_coef and output_router_logits"
        )
    return found


class _Routing:
    """The sums over tokens in one forward, from which losses and their gradients are computed."""

    def __init__(self, mask: Tensor, own: Tensor, weight: float, scale: Tensor) -> None:
        """Set the sums to zero; the arguments are those of `RouterLosses.begin`."""
        self.mask, self.own = mask, own
        self.weight, self.scale = weight, scale
        zero = mask.new_zeros((), dtype=torch.float64)
        self.counts = self.probabilities = zero
        """How often each expert is chosen, and the sum of its probabilities, over tokens and
        blocks: [E] after the first router. `RouterLosses.end` divides `counts` by the number of
        tokens."""
        self.z = zero
        """The sum of the tokens' z-losses over all blocks."""
        self.num_rows = zero
        """The number of tokens that count, summed over all blocks."""
        self.whole = False
        """True if routers are called with all tokens of the sequence, False if with this rank's."""
        self.is_over = False
        """True after the forward: calls of routers in a recompute are not counted again."""

    def tokens(self, count: int) -> Tensor:
        """Return the mask [N] of the N = `count` tokens that a router is called with."""
        self.whole = count == self.mask.numel()
        found = self.mask if self.whole else self.own
        assert found.numel() == count, (found.shape, count)
        return found.flatten()

    def add(self, logits: Tensor, top_k: int) -> None:
        """Add the tokens of one router to the sums, given its logits [N, E]."""
        seen = self.tokens(len(logits)).unsqueeze(-1)
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(top_k, dim=-1).indices
        # `counts` [N, E] is 1 for the k experts of each token, and 0 for the others.
        counts = torch.zeros_like(probabilities).scatter_(-1, chosen, 1)
        self.counts = counts.mul_(seen).sum(0) + self.counts
        self.probabilities = probabilities.mul_(seen).sum(0) + self.probabilities
        self.z = self.z + (logits.logsumexp(-1) ** 2 * seen[:, 0]).sum()
        self.num_rows = self.num_rows + seen.sum()

    def gradient(self, logits: Tensor, coefficients: RouterCoefficients) -> Tensor:
        """Return the gradient of the losses with respect to a router's logits, [N, E].

        Only after `RouterLosses.end`.
        """
        seen = self.tokens(len(logits)).unsqueeze(-1)
        softmax = logits.softmax(-1)
        # `of_p` is d aux / d p = E f / tokens, with f in `counts`. Then through the softmax p of
        # the logits: d / d logits = p (g - sum(p g)) for a gradient g of p.
        of_p = self.counts * (coefficients.aux * len(self.counts) / self.num_rows)
        of_logits = softmax * (of_p - (softmax * of_p).sum(-1, keepdim=True))
        if coefficients.z:
            # z is the mean of lse^2 with lse = logsumexp(logits), whose gradient is the softmax.
            lse = logits.logsumexp(-1, keepdim=True)
            of_logits += softmax * (lse * 2 * coefficients.z / self.num_rows)
        return of_logits * seen * (self.scale * self.weight)


def _experts_of_a_token(config: dict[str, Any]) -> int:
    """Return k, the number of experts of each token; raise ValueError if no key has it."""
    for name in ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k"):
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ValueError("router losses need num_experts_per_tok in the model's configuration")


class RouterLosses:
    """Computes the losses of a model's routers, over the tokens of all ranks of a sequence.

    Call `begin` before a forward with losses, and `end` after it; call `leave_out` before a forward
    without. Sources: Switch Transformer (arXiv 2101.03961), equations 4 to 6; ST-MoE for the
    z-loss. As in `load_balancing_loss_func` of transformers, all blocks count together.
    """

    def __init__(
        self,
        routers: list[tuple[nn.Module, int]],
        top_k: int,
        coefficients: RouterCoefficients,
        channel: Channel,
    ) -> None:
        """`routers`: each with the index of the logits in its output; `top_k`: experts of a token.

        `channel`: the ranks that share a sequence.
        """
        self._top_k, self.coefficients, self._channel = top_k, coefficients, channel
        self._routing: _Routing | None = None
        for router, place in routers:
            router.register_forward_hook(partial(self._routed, place))

    def begin(self, mask: Tensor, own: Tensor, *, weight: float, scale: Tensor) -> None:
        """Begin a forward with router losses.

        `mask` [B, S]: True for the tokens of the sequence that count; `own` [B, S']: the same for
        this rank's tokens. `weight`: the factor of the losses in the loss of the step. `scale` []:
        a further factor of the gradients.
        """
        self._routing = _Routing(mask, own, weight, scale)

    def leave_out(self) -> None:
        """Begin a forward without router losses."""
        self._routing = None

    def scaling(self) -> Callable[[Tensor], None]:
        """Return a function that scales the gradients of the last forward's losses by a tensor [].

        The gradients are computed in backward, so call the function before that.
        """
        routing = self._routing
        assert routing is not None

        def scale(factor: Tensor) -> None:
            routing.scale = routing.scale * factor

        return scale

    def end(self) -> Tensor:
        """End the forward; return the weighted sum [] of the losses of the whole sequence.

        All ranks of the channel must call it, because it may all-reduce the sums.
        """
        routing = self._routing
        assert routing is not None
        routing.is_over = True
        # All-reduce all sums in one transfer: [E] choices, [E] probabilities, z, number of tokens.
        rest = torch.stack((routing.z, routing.num_rows)).to(routing.counts.dtype)
        totals = torch.cat((routing.counts, routing.probabilities, rest))
        if not routing.whole:
            # The routers saw only this rank's tokens, so add the sums of all ranks.
            tag = Tag(Purpose.LOSS, tensor="routers")
            totals = self._channel.all_reduce(totals, tag=tag).wait()
        num_rows = totals[-1].clamp(min=1)
        counts, probabilities = (totals[:-2] / num_rows).chunk(2)
        routing.counts, routing.num_rows = counts, num_rows
        z = totals[-2] / num_rows
        aux = (counts * probabilities).sum() * len(counts)
        return (self.coefficients.aux * aux + self.coefficients.z * z) * routing.weight

    def _routed(self, index: int, _: nn.Module, __: object, given: Any) -> Any:
        """Count a router's output, and return it with a node that adds the losses' gradient.

        A forward hook; `given`: the output; `index`: the index of the logits in it.
        """
        routing = self._routing
        if routing is None:
            return given
        leaves, spec = tree_flatten(given)
        logits = given[index]
        # In the recompute of a block the tokens are counted already.
        if not routing.is_over:
            routing.add(widened(logits.detach().flatten(0, -2)), self._top_k)
        if not (torch.is_grad_enabled() and logits.requires_grad):
            return given
        # All outputs with a gradient go through the node, so that it runs if any of them is used.
        places = [i for i, x in enumerate(leaves) if x.requires_grad]
        tied = _Tied.apply(logits, routing, self.coefficients, *(leaves[i] for i in places))
        for place, x in zip(places, tied, strict=True):
            leaves[place] = x
        return tree_unflatten(leaves, spec)


class _Tied(Function):
    """The autograd node that adds the gradient of the losses to a router's logits.

    forward   the outputs of the router, unchanged
    backward  their gradients, unchanged, and the gradient of the losses to the logits
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        routing: _Routing,
        coefficients: RouterCoefficients,
        *given: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(logits)
        ctx.routing, ctx.coefficients = routing, coefficients
        return tuple(x.view_as(x) for x in given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        gradient = ctx.routing.gradient(widened(logits.flatten(0, -2)), ctx.coefficients)
        return gradient.view_as(logits).to(logits.dtype), None, None, *dy


def make_router_losses(
    model: Any, config: dict[str, Any], coefficients: RouterCoefficients, channel: Channel
) -> RouterLosses | None:
    """Return the losses of a model's routers; None if both coefficients are 0."""
    if not coefficients.of_losses:
        return None
    return RouterLosses(_find_routers(model), _experts_of_a_token(config), coefficients, channel)


def check_router_losses(
    model: Any,
    config: dict[str, Any],
    coefficients: RouterCoefficients,
    experts: Mapping[str, int],
    *,
    num_stages: int,
    tiles: int,
) -> None:
    """Raise ValueError if the model cannot have these losses or bias updates, or not as split.

    `experts`: the result of `isp.models.moe.load_balance.experts_of`; `num_stages`: the number of
    pipeline stages; `tiles`: tokens of a tile, 0 without tiles.
    """
    check_bias_update(model, experts, coefficients.bias_rate, tiles=tiles)
    if not coefficients.of_losses:
        return
    _find_routers(model)
    _experts_of_a_token(config)
    if num_stages > 1:
        raise ValueError(
            "router losses are computed over all layers together, which pipelines do not support:"
            " use parallel.pipeline.size=1, or model.router_aux_loss_coef=0 and"
            " output_router_logits=false in the model's configuration"
        )
    if tiles:
        raise ValueError(
            f"model.mlp_tile_tokens={tiles} cannot be combined with router losses: use 0"
        )

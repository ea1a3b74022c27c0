"""`TracedModel`: a model with its trace, checked against layouts and built into stage modules."""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

from torch import nn

from isp.core.attention.backend import AttentionBackend
from isp.core.attention.local import LocalAttention
from isp.core.layers.compiled import CompileWhen
from isp.core.layers.module import RowsOf
from isp.core.layers.rank_layers import RankLayers
from isp.core.mesh.config import ParallelConfig, PipelineConfig
from isp.core.mesh.sequence_split import Windows
from isp.core.pipeline.order import PipelineOrder
from isp.core.recompute.config import Recomputation
from isp.models.forwards import Forwards, Wrap
from isp.models.huggingface.config_json import check_layout, check_model_config
from isp.models.huggingface.initial_weights import InitialWeights
from isp.models.huggingface.interface import (
    HuggingFace,
    RouterCoefficients,
    check_row,
    interface_of,
)
from isp.models.meta import copied, freeze_unused, on_meta
from isp.models.moe.dispatch import check_spread
from isp.models.moe.load_balance import ExpertLoad, experts_of
from isp.models.moe.router_losses import check_router_losses, make_router_losses
from isp.models.positions import by_document
from isp.models.runtime.blocks import Blocks
from isp.models.runtime.mixers import TracedMixers, local_of
from isp.models.runtime.share import check_shares, run_with_a_share
from isp.models.runtime.stage_module import StageModule
from isp.models.runtime.weight_holders import WeightHolders
from isp.models.sharding.pipeline_split import Stage, check_stages, stages_of, tied_weight
from isp.models.sharding.tensor_plan import TensorPlan, tensor_plan
from isp.models.tracing.long_rows import LengthCheck
from isp.models.tracing.position import Position
from isp.models.tracing.probe import check_local
from isp.models.tracing.trace import check_supported, trace_model

__all__ = ["TracedModel", "position_rows"]

logger = logging.getLogger(__name__)
_Found = TypeVar("_Found")


def position_rows(model: nn.Module, tables: Iterable[nn.Module]) -> int | None:
    """Return the number of positions in the smallest table of learned positions; None: no table.

    `tables`: all embeddings of the model except that of its tokens. A table counts as one of
    positions if it has at least as many rows as config.json has positions, since a few models also
    have a table of two token types. Rows reserved at the start of a table are not counted.
    """
    interface = interface_of(model)
    config = interface.config(model)
    least = config.get("max_position_embeddings") or config.get("n_positions") or 0
    # OPT and RoBERTa reserve the first rows: position 0 is row 2, or the row after the padding.
    first = interface.first_position(model)
    weights = [(table, int(table.weight.shape[0])) for table in tables]  # type: ignore[index]
    return min(
        (rows - int(getattr(table, "offset", first)) for table, rows in weights if rows >= least),
        default=None,
    )


class TracedModel:
    """A model and its trace; it checks if a layout fits, and builds stage modules for any
    layout."""

    def __init__(
        self,
        model: nn.Module,
        *,
        recomputation: Recomputation = Recomputation(),  # noqa: B008
        attention_backend: AttentionBackend = AttentionBackend.AUTO,
        weights: InitialWeights | None = None,
        in_place: bool = True,
        loss_chunk_tokens: int = 4096,
        compile: CompileWhen = "auto",
        gives_scores: bool = False,
        router_losses: RouterCoefficients = RouterCoefficients(),  # noqa: B008
        earlier_names: Mapping[str, RowsOf] | None = None,
        allow_unchecked: bool = False,
    ) -> None:
        """Trace the model on the meta device and probe it on the CPU.

        `recomputation`: what blocks keep for backward and what they recompute.
        `attention_backend`: the implementation of attention over whole sequences.
        `weights`: source of the weights of a `model` on the meta device; None: `model` has them.
        `in_place`: `build` shards `model` itself; otherwise it shards a copy each time.
        `loss_chunk_tokens`: tokens whose logits the loss computes at a time; 0: all tokens.
        `compile`: when the loss of the head is compiled.
        `gives_scores`: per-token results may need gradients, so backward reads the head's weight.
        `router_losses`: coefficients; one that is 0 is taken from the model's own configuration.
        `earlier_names`: by name of a parameter, its rows in checkpoints of earlier versions.
        `allow_unchecked`: if the probe cannot run the model, warn instead of raising.

        Raises ValueError for a model that cannot be traced, that mixes tokens outside of attention,
        or, if the probe could not run, a model of transformers that ignores its positions.
        """
        self.interface = interface_of(model)
        self.recomputation = recomputation
        self.loss_chunk_tokens = loss_chunk_tokens
        self.compile = compile
        self.gives_scores = gives_scores
        self.router_losses = router_losses
        self.attention_backend = attention_backend
        self.model = model
        self.earlier_names = earlier_names or {}
        self.allow_unchecked = allow_unchecked
        self._weights = weights
        self._in_place = in_place
        self._found: dict[Hashable, Any] = {}
        """The results cached by `_once`; copies with the same `shape` and `trace` share them."""
        check_supported(model)
        self.shape = self.interface.without_values(on_meta(model))
        """The model on the meta device, whose mixers call those that `mix_by` sets.

        It is never changed after `interface.connect` below."""
        self.interface.connect(self.shape)
        # Trace a copy: a forward may leave state in modules, which `shape` must not have.
        traced = self._empty()
        self.trace = trace_model(traced, self.interface.forward)
        self._check_recomputation()
        freeze_unused(self.shape, self.trace.unused)
        run = self.trace, self.interface.forward
        probed = check_local(self.shape, model.buffers(), *run, allow_unchecked=allow_unchecked)
        self._probed = probed
        """How the probe ran the model; None: the probe could not run it."""
        self._lengths = LengthCheck(model, self._empty, *run)
        # A model that passed the probe may have no positions. Without the probe, a model that does
        # not read them may count its tokens instead, which is wrong in a part of a sequence.
        if not (
            probed or self.trace.reads_positions or not isinstance(self.interface, HuggingFace)
        ):
            raise ValueError(
                f"{type(model).__name__} ignores position_ids, so positions within each rank's part"
                f" and within packed documents would be wrong: let its forward use position_ids"
            )
        if not all(sizes.causal for sizes in self.trace.attentions):
            logger.warning(
                "%s uses bidirectional attention: if labels are next tokens, the loss sees the"
                " answer (models of transformers: set is_decoder=True in the configuration)",
                type(model).__name__,
            )

    def _empty(self) -> nn.Module:
        """Return a copy of `shape`, the model on the meta device, whose modules callers may
        change."""
        # Parameters are shared with `shape`: callers replace them, and never write into them.
        return copied(self.shape, {id(p): p for p in self.shape.parameters()})

    def with_options(self, **keys: Any) -> TracedModel:
        """Return a copy of this model with new values of attributes, without tracing again.

        `keys`: the new values by name of an attribute, such as `recomputation`. Most attributes
        have the name of the argument of `__init__` that sets them.
        """
        other = copy.copy(self)
        assert keys.keys() <= vars(other).keys(), keys
        vars(other).update(keys)
        if {"shape", "trace"} & keys.keys():
            other._found = {}
        other._check_recomputation()
        return other

    def frozen(self) -> TracedModel:
        """Return a copy of this model in which no weight is trained."""
        model, shape = copy.deepcopy((self.model, self.shape))
        model.requires_grad_(False)
        shape.requires_grad_(False)
        return self.with_options(model=model, shape=shape)

    def _once(self, key: Hashable, find: Callable[[], _Found]) -> _Found:
        """Return `find()`, computed once per `key`; it must depend on key, shape and trace only."""
        if key not in self._found:
            self._found[key] = find()
        return cast(_Found, self._found[key])

    def _check_recomputation(self) -> None:
        """Raise ValueError if `mlp_tile_tokens` is set and no module can run in tiles."""
        if self.recomputation.mlp_tile_tokens and not self.trace.by_token:
            raise ValueError(
                f"model.mlp_tile_tokens={self.recomputation.mlp_tile_tokens}: no module in the"
                f" blocks of {type(self.model).__name__} can be tiled (it must take one tensor of"
                f" tokens, give such tensors, and contain several linear layers or experts but no"
                f" attention): use 0"
            )

    @property
    def hidden_size(self) -> int:
        """The number of features of a token between blocks, in all hidden states that a block
        returns."""
        form = self.trace.outputs.get(self.trace.blocks[0])
        return self._first_table.embedding_dim if form is None else form.width

    @property
    def vocab_size(self) -> int:
        """The number of logits of a token, which may be less or more than `vocab_rows`."""
        return self.trace.vocab_size

    @property
    def vocab_rows(self) -> int:
        """The number of different token ids that the model accepts: rows of its first table."""
        return self._first_table.num_embeddings

    @property
    def _first_table(self) -> nn.Embedding:
        """The embedding that a forward looks up first: that of token ids."""
        table = self.shape.get_submodule(self.trace.tables[0])
        assert isinstance(table, nn.Embedding)
        return table

    @property
    def num_parameters(self) -> int:
        """The number of elements of all parameters, with shared ones counted once."""
        return sum(self.trace.sizes.values())

    @property
    def trained_names(self) -> tuple[str, ...]:
        """The names of all parameters that are not frozen, in the model's order."""
        return tuple(n for n, p in self.shape.named_parameters() if p.requires_grad)

    @property
    def checkpoints_frozen(self) -> bool:
        """True if checkpoints contain frozen weights; with adapters, they do not."""
        return not hasattr(self.model, "peft_config")

    def flops(self, document_lengths: Iterable[int]) -> int:
        """Return the FLOPs of forward and backward over documents of these lengths, in tokens.

        Matrix products, attention, convolutions and scans count, with twice the forward's FLOPs for
        backward. Only the experts that a token is routed to count. A lookup in a table counts
        nothing; a head tied to that table counts as a product. Recomputation is not counted, so
        that the number measures the work that is required and not the work that is done.
        """
        lengths = list(document_lengths)
        # A multiply-add counts 2 FLOPs, three times: in forward, dgrad and wgrad.
        total = 6 * self.trace.multiplied * sum(lengths)
        for sizes in self.trace.attentions:
            size = sizes.head_size + sizes.value_size
            # `pairs` is twice the number of pairs, which is the 2 FLOPs per multiply-add.
            total += 3 * sizes.num_heads * size * sum(map(sizes.pairs, lengths))
        return total + 3 * sum(call.flops for call in self.trace.calls) * sum(lengths)

    @property
    def tied_weight(self) -> str | None:
        """The name of the weight that the first and last pipeline stages share, if there is one."""
        return self._once("tied weight", partial(tied_weight, self.shape, self.trace))

    @property
    def attention_windows(self) -> Windows:
        """Each attention window with its number of blocks; empty for a model without attention.

        For packed sequences the windows decide which rank gets which tokens.
        """
        return tuple(Counter(sizes.window for sizes in self.trace.attentions).items())

    @property
    def learned_positions(self) -> int | None:
        """The number of rows of the smallest table of learned positions; None if there is none."""
        names = dict.fromkeys(self.trace.tables)
        # Leave out the first table, which is that of the tokens.
        tables = [self.shape.get_submodule(name) for name in names][1:]
        return position_rows(self.model, tables)

    def with_head_size(self, parallel: ParallelConfig) -> ParallelConfig:
        """Return `parallel` with the tensor group divided into head ranks x context ranks.

        The number of head ranks follows from the fewest query heads and the common divisor of the
        KV heads of all attention layers. Raises ValueError if a head rank has no query head.
        """
        sizes = self.trace.attentions
        # Without attention any number of heads is right: scans use the whole tensor group.
        query = min((s.num_heads for s in sizes), default=parallel.tensor.size)
        return parallel.for_heads(query, math.gcd(*(s.num_kv_heads for s in sizes)) or 1)

    def check_layout(self, parallel: ParallelConfig, seq_len: int) -> None:
        """Check that the model can run in the layout `parallel`; `seq_len`: tokens of a batch row.

        Raises ValueError that names key, value and what to do. It needs no process group, so it can
        run before ranks start.
        """
        check_layout(parallel, seq_len)
        if self.recomputation.distributed:
            parallel.tensor.check_distributes_inputs(self.hidden_size, seq_len)
        self.with_head_size(parallel)
        config = self.interface.config(self.model)
        check_model_config(config, parallel)
        check_row(self.interface.most_tokens(self.model), seq_len)
        experts, tiles = experts_of(self.shape, self.trace), self.recomputation.mlp_tile_tokens
        check_spread(type(self.model).__name__, self.trace, config, parallel.expert)
        if parallel.weight.vocab_parallel_loss and not parallel.tensor.mode.splits_features:
            self._check_vocab_parallel_loss(parallel.tensor.size)
        num_stages = parallel.pipeline.size * parallel.pipeline.num_chunks
        coefficients = self._router_losses()
        check_router_losses(
            self.model, config, coefficients, experts, num_stages=num_stages, tiles=tiles
        )
        if num_stages > 1:
            self._check_stages(num_stages, parallel.pipeline)
        if parallel.tensor.mode.splits_features:
            self._tensor_plan.check_sizes(self.shape, self.trace, parallel.tensor.size)
            self._try_shares(parallel.tensor.size)

    def check_length(self, parallel: ParallelConfig, tokens: int) -> None:
        """Raise ValueError if the model computes other results because rows have this many
        `tokens`.

        Rows up to 9/8 of the longest one that was checked before are not checked again.
        """
        parts = parallel.tensor.size if parallel.tensor.mode.splits_sequence else 1
        self._lengths.check(tokens, tokens // parts, allow_unchecked=self.allow_unchecked)

    def _check_vocab_parallel_loss(self, size: int) -> None:
        """Raise ValueError if `size` ranks cannot each have a slice of all tokens' logits."""
        vocab, key = self.trace.vocab_size, "parallel.weight.vocab_parallel_loss"
        if self.trace.head is None:
            raise ValueError(
                f"{key}=true needs logits that are made from the output of one last nn.Linear and"
                f" scalars alone (a soft cap is allowed), after blocks that keep the shape of their"
                f" input: {type(self.model).__name__} is not like that, use false"
            )
        if vocab % size:
            raise ValueError(
                f"parallel.tensor.size={size} must divide the vocabulary of {vocab} logits for"
                f" {key}: use a divisor, or {key}=false"
            )

    def _check_stages(self, num_stages: int, pipeline: PipelineConfig) -> None:
        """Raise ValueError if the model cannot be cut into this many pipeline stages."""
        try:
            stages = stages_of(self.shape, self.trace, num_stages)
            whole = self.shape, self.model.buffers(), self.trace, self.interface.forward
            self._once(("cut", num_stages), partial(check_stages, *whole, stages))
            # A model that is only evaluated may have ranks without trainable weights.
            trains = any(p.requires_grad for p in self.shape.parameters())
            for rank in range(pipeline.size if trains else 0):
                own = PipelineOrder(pipeline).stages_of(rank)
                names = frozenset[str]().union(*(stages[number].parameters for number in own))
                if not any(self.shape.get_parameter(name).requires_grad for name in names):
                    raise ValueError(f"pipeline rank {rank} has no trainable weights")
        except ValueError as error:
            raise ValueError(
                f"parallel.pipeline.size={pipeline.size} cannot cut {type(self.model).__name__}"
                f" into {num_stages} stages: {error}"
                f"{'; use 1' if num_stages <= len(self.trace.blocks) else ''}"
            ) from None

    @property
    def _tensor_plan(self) -> TensorPlan:
        """The tensor-parallel plan, for modes that split features.

        Raises ValueError if the model has none.
        """
        return self._once("tensor plan", self._make_plan)

    def _make_plan(self) -> TensorPlan:
        """Make the tensor-parallel plan, or raise ValueError that says how to go on without one."""
        try:
            if hasattr(self.model, "peft_config"):
                raise ValueError("it does not cover adapters")
            return tensor_plan(self.shape, self.trace, self.interface.tensor_styles(self.shape))
        except ValueError as error:
            raise self._not_split(error) from None

    def _try_shares(self, size: int) -> None:
        """Raise ValueError if the model's code needs more than a rank's share of the features.

        `size`: tensor ranks. The check runs on one process, before ranks start. See [Note: Shares]
        in docs/design/notes/models.md.
        """
        if size == 1:
            return

        # Runs on meta tensors, and checks that the code runs and with which heads it calls
        # attention.
        def check_shapes() -> None:
            build = partial(self._chunk, stages=stages_of(self.shape, self.trace, 1))
            run_with_a_share(build, self.shape, self.trace, self._tensor_plan, size)

        # Runs on the CPU, and checks that a share of the features gives that share of the results.
        def check_values() -> None:
            if self._probed:
                # Without a probe that ran, it is not known whether the model runs on the CPU.
                whole = self.shape, self.model.buffers(), self.trace, self.interface.forward
                check_shares(*whole, self._tensor_plan, size, self._probed)

        try:
            self._once(("shapes of shares", size, self.recomputation), check_shapes)
            self._once(("values of shares", size), check_values)
        except Exception as error:  # the model's own code may raise anything on a rank's shapes
            raise self._not_split(error) from None

    def _not_split(self, why: Exception) -> ValueError:
        """Return the error for a model that cannot be sharded by features, because of `why`."""
        reason = next(iter(str(why).splitlines()), "")
        if not isinstance(why, ValueError | RuntimeError):
            reason = f"its code does not run on a rank's features: {type(why).__name__}: {reason}"
        return ValueError(
            f"{type(self.model).__name__} cannot be sharded by its tensor-parallel plan, as"
            f" parallel.tensor.mode needs: {reason}; use mode isp, which needs no plan"
        )

    def build(
        self,
        layers: RankLayers,
        stages: Iterable[int] = (0,),
        num_stages: int = 1,
        *,
        attention: LocalAttention | None = None,
    ) -> tuple[StageModule, ...]:
        """Build the stage modules of a rank that has the pipeline `stages`, of `num_stages` in all.

        Weights that have a source are not initialized yet: call `StageModule.init_weights`. A
        weight that two of the stages use is one parameter. `attention` computes attention over
        whole sequences; None: what the model's `attention_backend` has for each kind of attention
        on the device of `layers`. Raises ValueError if it does not run there. Shards the model
        itself if it is used in place, otherwise a copy; on the meta device, a copy without memory.
        """
        every = stages_of(self.shape, self.trace, num_stages)
        own = tuple(every[number] for number in stages)
        chunk = self._chunk(layers, attention, own)
        return (chunk,) if num_stages == 1 else tuple(map(chunk.of_stage, own))

    def _chunk(
        self, layers: RankLayers, attention: LocalAttention | None, stages: tuple[Stage, ...]
    ) -> StageModule:
        """Return one module with the parameters of all `stages`, which runs the whole model."""
        if layers.device.type == "meta":
            model = self._empty()
        else:
            model = self.model if self._in_place else copy.deepcopy(self.model)
            self.interface.connect(model)
            # Freeze them here as well, because `freeze_unused` froze only the parameters of
            # `shape`.
            for name in self.trace.unused:
                model.get_parameter(name).requires_grad_(False)
        local = local_of(layers, self.attention_backend, attention)
        plan = self._tensor_plan if layers.splits_features else None
        # All wrappers are collected before one is installed: their order is that of `Wrap`.
        position, forwards = Position(layers.communicator), Forwards()
        position.mixers = TracedMixers(layers, position, local, self.trace.attentions)
        blocks = Blocks(self.trace, layers, self.recomputation, stages, position)
        holders = WeightHolders(
            model,
            self.trace,
            layers,
            position=position,
            blocks=blocks,
            forwards=forwards,
            plan=plan,
            stages=stages,
            tile_tokens=self.recomputation.mlp_tile_tokens,
        )
        for part, limit in self.interface.length_limits(model).items():
            forwards.add(part, Wrap.COMPUTE, by_document(limit, position.document_lengths))
        forwards.install()
        routers = load = None
        if layers.device.type != "meta":
            coefficients, experts = self._router_losses(), experts_of(self.shape, self.trace)
            config = self.interface.config(model)
            routers = make_router_losses(model, config, coefficients, layers.tensor)
            if experts:
                load = ExpertLoad(model, experts, layers.device, rate=coefficients.bias_rate)
            if self.loss_chunk_tokens and self.trace.head is None:
                logger.warning(
                    "model.loss_chunk_tokens=%d has no effect: %s computes its logits from more"
                    " than its last linear layer, so all logits are in memory at once",
                    self.loss_chunk_tokens,
                    type(self.model).__name__,
                )
        return StageModule(
            self.interface,
            holders,
            blocks,
            weights=self._weights,
            loss_chunk_tokens=self.loss_chunk_tokens,
            compile=self.compile,
            gives_scores=self.gives_scores,
            routers=routers,
            expert_load=load,
        )

    def _router_losses(self) -> RouterCoefficients:
        """Return the coefficients of router losses; a 0 is replaced by the model's own
        coefficient."""
        asked, own = self.router_losses, self.interface.router_coefficients(self.model)
        return RouterCoefficients(*(a or b for a, b in zip(asked, own, strict=True)))

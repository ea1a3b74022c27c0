"""`OwnLosses`: the methods of a run for a caller's own losses, and their backward passes.

B batch, S sequence, D hidden size, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from isp.config import JobConfig
from isp.core.comm import Mesh
from isp.core.comm.tag import Tag
from isp.core.mesh import Axis
from isp.loop.asked import Asking, TokenScores, TopTokens
from isp.loop.callers_graphs import Asked, CallersGraphs
from isp.models.huggingface.interface import LogitsOf
from isp.step.train_step import TrainStep

__all__ = ["OwnLosses"]


class OwnLosses:
    """The methods of `ParallelRun` for losses that the caller computes."""

    config: JobConfig
    mesh: Mesh
    device: torch.device
    train_step: TrainStep
    _asking: Asking
    _graphs: CallersGraphs

    def _check(self, *, trains: bool) -> None:
        """Raise RuntimeError for what cannot be computed or trained now; see `ParallelRun`."""
        raise NotImplementedError

    def log_probs(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> TokenScores:
        """Return the log-probability of each label, the log-sum-exp and `entropy`, each [B, S].

        Position t has the log-probability, in nats, of labels[t] given the tokens before it, for
        logits divided by `temperature`. It is 0, without a gradient, at the first token of a
        document and where a label is -100. The entropy, in nats, is None unless requested. Results
        are the same on all ranks of a sequence, in the order of your tokens, in float32 or wider;
        the logits never exist all at once.

        Arguments are as in `loss`; `labels` None: the tokens. Sequences may have any length. Tokens
        that `attention_mask` [B, S] masks, at either end, are neither attended to nor scored.
        Compute a scalar from the results and pass it to `backward`; several results may wait for
        their backward. Under `torch.no_grad()` no activations are kept. Raises TypeError for
        arguments that are not tensors, and for ids that are not integers; ValueError for shapes
        that do not fit and, with gradients, for pipeline stages: use `forward_backward`.
        """
        rows = input_ids, labels, position_ids, attention_mask
        asked = self._asking.scores(*rows, temperature=temperature, entropy=entropy)
        scores: TokenScores = self._answer("log_probs", asked)
        return scores

    @overload
    def logits(
        self,
        input_ids: Tensor,
        pick: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        top_k: None = None,
        attention_mask: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Tensor: ...

    @overload
    def logits(
        self,
        input_ids: Tensor,
        pick: None = None,
        position_ids: Tensor | None = None,
        *,
        top_k: int,
        attention_mask: Tensor | None = None,
        temperature: float = 1.0,
    ) -> TopTokens: ...

    def logits(
        self,
        input_ids: Tensor,
        pick: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        top_k: int | None = None,
        attention_mask: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Tensor | TopTokens:
        """Return logits divided by `temperature`, in float32 or wider.

        As in transformers, logits at position t predict the token at t + 1. The result has, with
        `pick` [B, S, k], the logits of these tokens, [B, S, k]; with `top_k`, the largest logits
        of the vocabulary and their tokens, [B, S, top_k] each; else all logits, [B, S, V], in
        several copies on every rank of a sequence. For a token classifier, V is the number of
        labels. For a sequence classifier the result is [B, labels], taken at the last token that is
        not the configuration's `pad_token_id`, as in transformers. Values (not `indices`) have
        gradients, as in `log_probs`. Raises as `log_probs` does.
        """
        asked = self._asking.logits(
            input_ids, pick, position_ids, attention_mask, top_k=top_k, temperature=temperature
        )
        found: Tensor | TopTokens = self._answer("logits", asked)
        return found

    def hidden(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the head, [B, S, D], in float32 or wider, for heads of your own.

        It has the whole sequence and is the same on all ranks of a sequence; compute a loss from it
        as from `log_probs`. Keep the parameters of your head equal on all ranks: their gradients
        are of one data rank's sequences, so sum them over data ranks yourself. Raises as
        `log_probs` does, and ValueError for a model that does not end in a linear.
        """
        asked = self._asking.hidden(input_ids, position_ids, attention_mask)
        found: Tensor = self._answer("hidden", asked)
        return found

    def _answer(self, name: str, asked: Asked) -> Any:
        """Compute a query and return the caller's result; `name` is the method, for errors."""
        self._check_stages(name)
        self._check(trains=torch.is_grad_enabled())
        return asked.answer(self._graphs.results(asked))

    def _check_trained(self, name: str) -> None:
        """Raise RuntimeError if `name` is called with gradients but no weight is trained."""
        if torch.is_grad_enabled() and not self.train_step.built.trained:
            raise RuntimeError(f"all weights are frozen: call run.{name} under torch.no_grad()")

    def _check_stages(self, name: str) -> None:
        """Raise ValueError if `name` is called with gradients on several pipeline stages.

        The stages' backward passes have to be scheduled, which the caller's autograd cannot do.
        """
        stages = self.mesh[Axis.PIPELINE].size
        if stages > 1 and torch.is_grad_enabled():
            raise ValueError(
                f"run.{name} with gradients and parallel.pipeline.size={stages}: call"
                f" run.forward_backward(batches, loss_function), or this under torch.no_grad()"
            )

    def forward_backward(
        self,
        batches: Sequence[Mapping[str, Any]],
        loss_function: Callable[[Any, Mapping[str, Any]], Tensor],
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        last: bool = False,
    ) -> Tensor:
        """Run forward and backward of micro-batches, in a pipeline if there is one.

        Returns the losses [len(batches)], float64, the same on all ranks of a sequence.

        Each of `batches` has `input_ids`, optionally `labels`, `position_ids` and `attention_mask`
        as in `log_probs`, and further entries that `loss_function(scores, batch)` reads. That
        function returns a scalar, computed from the results of `log_probs` for the micro-batch (of
        `logits`, for a classifier). Pass the same to all ranks of a sequence, on all stages. Only
        ranks of the last stage call the function, in order, while others compute, so it must not
        call collectives; put results of other models, such as a reference, into `batches`.
        Gradients add up until `step`, as in `backward`; under `torch.no_grad()` there are none.
        `last`: see `backward`. Raises as `log_probs` does, ValueError for a number of batches that
        the pipeline schedule cannot run, and RuntimeError with gradients if all weights are frozen.
        """
        pipeline = self.config.parallel.pipeline
        if not batches:
            raise ValueError("forward_backward was given no batches")
        pipeline.check_micro_batches(len(batches), "len(batches)")
        self._check_trained("forward_backward")
        asked = [self._asked(batch, temperature, entropy) for batch in batches]
        self._check(trains=torch.is_grad_enabled())

        def of_results(index: int, found: Tensor) -> Tensor:
            """Return the caller's loss of micro-batch `index` from its results [B, S, K]."""
            return loss_function(asked[index].answer(found), batches[index])

        return self._graphs.forward_backward(asked, of_results, last=last)

    def _asked(self, batch: Mapping[str, Any], temperature: float, entropy: bool) -> Asked:
        """Return the query for one of `forward_backward`'s batches."""
        if "input_ids" not in batch:
            raise ValueError(f"a batch has no input_ids: it has {', '.join(map(str, batch))}")
        others: Any = [batch.get(name) for name in ("labels", "position_ids", "attention_mask")]
        if self._asking.logits_of is LogitsOf.VOCABULARY:
            how: Any = {"temperature": temperature, "entropy": entropy}
            return self._asking.scores(batch["input_ids"], *others, **how)
        rest = others[1:]
        return self._asking.logits(batch["input_ids"], None, *rest, temperature=temperature)

    def backward(self, loss: Tensor, *, last: bool = False) -> None:
        """Run the backward of a scalar computed from `log_probs`, `logits`, `hidden` or `loss`.

        It can be called several times before a `step`: gradients add up, over data ranks too, and
        are not divided by anything (see `count`). A result of `loss` is a mean over data ranks
        already: for n micro-batches pass each as `loss / n`, before the next call of `loss`. All
        ranks of a sequence must compute the same scalar, which counts once. `last=True` declares
        that no other backward follows before the step, so gradients are reduced while it runs. A
        weight that no loss of a step reaches, such as the head in a step of `hidden` alone, keeps
        its value and its optimizer states, as with torch's optimizers.

        A failure in the model's backward drops the gradients since the last step; an error before
        it (no scalar, the caller's own graph, results that are not valid any more) leaves them.

        Raises ValueError for a loss that is not a scalar, and RuntimeError if it does not depend on
        a result that waits for a backward, and after `grad_norm` or a backward with `last=True`.
        """
        self._check(trains=True)
        self._graphs.backward(loss, last=last)

    def count(self, mask: Tensor) -> Tensor:
        """Return the sum of `mask` (any shape) over data ranks, [], float64, on the device.

        All ranks of a sequence pass the same mask. Use it to divide a loss by the number of tokens
        or sequences of the global batch.
        """
        total = mask.to(self.device).sum(dtype=torch.float64)
        return self.mesh[Axis.DATA].all_reduce(total, tag=Tag(tensor="count")).wait()

    def grad_norm(self) -> float:
        """Return the global norm of the gradients of `backward`, as `step` will report it.

        This sums the gradients over ranks, so no `backward` may follow before `step` or
        `zero_grad`. Raises RuntimeError if there was no `backward`; `step(loss)` reports the norm
        itself.
        """
        self._check(trains=True)
        return self._graphs.grad_norm()

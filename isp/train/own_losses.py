"""`OwnLosses`: what a run gives for losses of the caller's own, and their backward passes.

B batch, S sequence, D hidden size, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from isp.comm import Mesh
from isp.comm.tag import Tag
from isp.config import JobConfig
from isp.models.hosts import LogitsOf
from isp.parallel import Axis
from isp.train.asked import Asking, Question, TokenScores, TopTokens
from isp.train.callers_graphs import CallersGraphs
from isp.train.step import TrainStep
from isp.train.step_work import StepWork

__all__ = ["OwnLosses"]


class OwnLosses:
    """The part of a `ParallelRun` that has to do with them."""

    config: JobConfig
    mesh: Mesh
    device: torch.device
    train_step: TrainStep
    _asking: Asking
    _graphs: CallersGraphs
    _pending: tuple[Tensor, StepWork, RemovableHandle] | None

    def _check(self, *, trains: bool) -> None:
        """As of `ParallelRun`."""
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
        """The log-probability of each label, the log-sum-exp and `entropy` if asked, each [B, S].

        Of place t of a row that is log p(labels[t]) by the tokens before it, of logits divided by
        `temperature`; 0, without a gradient, at the first token of a document and where a label is
        -100. The same on all ranks of a sequence, in the caller's order, float32 at least; logits
        never exist as a whole. `input_ids`, `labels` and `position_ids` are as in `loss`; None: the
        tokens. Rows may be of any length; what `attention_mask` [B, S] leaves out, on whichever
        side, is neither seen nor scored. Compute any scalar of it and give that to `backward`;
        several may be alive until then. Under `torch.no_grad()` nothing is kept. Raises ValueError
        for shapes that do not fit and, with gradients, for pipeline stages: see `forward_backward`.
        """
        rows = input_ids, labels, position_ids, attention_mask
        question = self._asking.scores(*rows, temperature=temperature, entropy=entropy)
        scores: TokenScores = self._answer("log_probs", question)
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
        """Logits / `temperature`, for a loss such as `log_probs` are, float32 at least.

        Aligned as transformers': those of place t are of the token at t + 1. Of the tokens `pick`
        [B, S, k], -> [B, S, k]; or the `top_k` largest of the whole vocabulary, with their tokens;
        or all, [B, S, V], in several copies on every rank of a sequence. Of a model that classifies
        tokens the same of its labels; of one that classifies sequences [B, labels], where
        transformers takes them: at the last token of a row that is not the configuration's
        `pad_token_id`. Raises as `log_probs` does.
        """
        question = self._asking.logits(
            input_ids, pick, position_ids, attention_mask, top_k=top_k, temperature=temperature
        )
        found: Tensor | TopTokens = self._answer("logits", question)
        return found

    def hidden(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """What the head is given, [B, S, D], for heads of the caller's own, float32 at least.

        Whole and the same on all ranks of a sequence, to make a loss of as of `log_probs`. Such a
        head is the caller's to keep alike on all ranks: its gradients are those of the rows of a
        data rank. Raises as `log_probs` does, and for a model without a linear at its end.
        """
        question = self._asking.hidden(input_ids, position_ids, attention_mask)
        found: Tensor = self._answer("hidden", question)
        return found

    def _answer(self, name: str, question: Question) -> Any:
        self._check_stages(name)
        self._pending = None
        self._check(trains=torch.is_grad_enabled())
        return question.answer(self._graphs.results(question.asked))

    def _check_trained(self, name: str) -> None:
        """Raise RuntimeError where `name` would have to go backward, and there is nothing to."""
        if torch.is_grad_enabled() and not self.train_step.built.trained:
            raise RuntimeError(f"all weights are frozen: call run.{name} under torch.no_grad()")

    def _check_stages(self, name: str) -> None:
        """Raise ValueError where a backward pass from `name` would have to go through stages."""
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
        """Forward and backward of micro-batches, in a pipeline if there is one; losses, float64.

        Each of `batches` has `input_ids`, maybe `labels`, `position_ids` and `attention_mask`, as
        `log_probs` takes them, and whatever else `loss_function(scores, batch)` reads: that makes
        a scalar of what `log_probs` gives of the micro-batch (`logits`, if the model classifies).
        All ranks of a sequence are given the same, on all stages; it is called in the order of the
        micro-batches, by the ranks of the last stage alone, while others compute: it may call no
        collective that others join. What needs a forward of another model goes into `batches`
        before. The scalars' gradients add up until `step`, as those of `backward`; under
        `torch.no_grad()` there are none. -> [micro-batches], the same on all ranks that share
        them. `last`: see `backward`. Raises ValueError for what does not fit.
        """
        pipeline = self.config.parallel.pipeline
        if not batches:
            raise ValueError("forward_backward was given no batches")
        pipeline.check_micro_batches(len(batches), "len(batches)")
        self._check_trained("forward_backward")
        questions = [self._question(batch, temperature, entropy) for batch in batches]
        self._pending = None
        self._check(trains=torch.is_grad_enabled())

        def of_results(index: int, found: Tensor) -> Tensor:
            return loss_function(questions[index].answer(found), batches[index])

        asked = [question.asked for question in questions]
        return self._graphs.forward_backward(asked, of_results, last=last)

    def _question(self, batch: Mapping[str, Any], temperature: float, entropy: bool) -> Question:
        if "input_ids" not in batch:
            raise ValueError(f"a batch has no input_ids: it has {', '.join(map(str, batch))}")
        others: Any = [batch.get(name) for name in ("labels", "position_ids", "attention_mask")]
        if self._asking.logits_of is LogitsOf.VOCABULARY:
            how: Any = {"temperature": temperature, "entropy": entropy}
            return self._asking.scores(batch["input_ids"], *others, **how)
        rest = others[1:]
        return self._asking.logits(batch["input_ids"], None, *rest, temperature=temperature)

    def backward(self, loss: Tensor, *, last: bool = False) -> None:
        """The backward pass of a scalar that the caller made of `log_probs`, `logits`, `hidden`.

        Any number of times before a `step`: gradients add up, those of data ranks, too; the ranks
        of a sequence compute the same scalar, which counts once. Nothing is divided by anything:
        see `count`. `last`: none comes behind it before the step, so gradients are reduced while it
        runs. What fails drops the gradients since the last step. Raises RuntimeError where the loss
        is made of nothing that waits for a backward.
        """
        self._check(trains=True)
        self._pending = None
        self._graphs.backward(loss, last=last)

    def count(self, mask: Tensor) -> Tensor:
        """The sum of `mask`, the same on the ranks of a sequence, over data ranks; [], float64."""
        total = mask.to(self.device).sum(dtype=torch.float64)
        return self.mesh[Axis.DATA].all_reduce(total, tag=Tag(tensor="count")).wait()

    def grad_norm(self) -> float:
        """The global norm of the gradients of `backward`, as `step` will report it.

        The last call before a `step` or `zero_grad`: gradients are summed over the ranks by it.
        Raises RuntimeError where there was no `backward`; `step(loss)` reports it itself.
        """
        self._check(trains=True)
        return self._graphs.grad_norm()

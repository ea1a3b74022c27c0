"""Compare ISP with transformers' own tensor parallelism and FSDP, as transformers' tests do.

    python tools/check_with_transformers.py             # a model of each mechanism, CPU ranks, gloo
    python tools/check_with_transformers.py llama --only fsdp

Repeats tests/test_tensor_parallel_mixin.py and tests/test_fsdp_mixin.py of transformers with its
`DistributedConfig` and with ISP. Prints a markdown table of each. A cell has the largest
differences from the plain model: of outputs (logits and loss, or losses and gradient norms) in
float32, of gradients (or weights) in float32, and of these in float64, divided by the largest
element of each. Exits with 1 if a run of ISP fails or is not within 1e-5.
"""

from __future__ import annotations

import argparse
import inspect
import math
import sys
import tempfile
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch
import torch._dynamo  # torch.optim imports it in every forked rank, unless it is imported here
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed import checkpoint as their_checkpoints
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isp.config import JobConfig
from isp.config.data import DataConfig
from isp.config.sections import TrainingConfig
from isp.core.mesh.config import ExpertConfig, Mode, ParallelConfig, TensorConfig, WeightConfig
from isp.loop.parallelize import ParallelRun, parallelize  # imported before ranks are forked
from isp.models.huggingface.tiny import kept_in_float64
from isp.parity.forked import RankError, run_ranks
from model.config import ModelConfig

RANKS, BATCH, LENGTH, SEED = 2, 2, 64, 42
STEPS, RATE = 20, 3e-4
TOLERANCES = 1e-5, 5e-3
"""Tolerances of `allclose`, each both absolute and relative: that of transformers' tensor-parallel
and FSDP tests, and that of older versions of the tensor-parallel tests."""

TESTER = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 32, "hidden_act": "gelu",
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 36, "num_experts_per_tok": 2,
    "num_experts": 8,
}  # fmt: skip
"""Sizes of transformers' CausalLMModelTester (`_TEXT_MODEL_TESTER_DEFAULTS` of 5.23). Its
tests round the vocabulary of 99 up to the ranks. Keys that a configuration lacks are left out."""
FSDP_TESTER = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 4, "moe_intermediate_size": 32,
}  # fmt: skip
"""Sizes that transformers' class of FSDP tests sets in `_get_tiny_config`."""

MODELS: dict[str, dict[str, Any]] = {
    # These sizes are not those of transformers' tests: windows of 16, as 64 tokens would not reach
    # the end of a larger one, shared KV heads of llama and 8 experts of gpt_oss.
    "llama": {"num_attention_heads": 4},
    "qwen3": {},
    "gemma2": {"sliding_window": 16},
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere": {},
    "olmo2": {},
    "mixtral": {},
    "qwen3_moe": {},
    "deepseek_v3": {
        "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "gpt_oss": {"num_local_experts": 8, "sliding_window": 16},
    "qwen3_next": {
        "hidden_act": "silu", "layer_types": ["linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe"], "head_dim": 32,
        "num_attention_heads": 4, "intermediate_size": 40, "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 40, "ssm_state_size": 16, "mamba_num_heads": 8,
        "n_groups": 8, "mamba_head_dim": 16, "conv_kernel": 4, "chunk_size": 64,
    },
    "lfm2": {"layer_types": ["full_attention", "conv"]},
}  # fmt: skip
"""Sizes that small models need in addition, by model type, from the tests of transformers."""


class Case(NamedTuple):
    """A saved model, and how to run it: plain, by transformers (`theirs`) or by ISP (`ours`)."""

    folder: str
    """Folder of the saved model."""
    dtype: torch.dtype
    work: str = ""
    """An empty folder that all ranks may write."""
    theirs: dict[str, Any] | None = None
    """Keys of transformers' DistributedConfig; None: transformers does not shard the model."""
    ours: ParallelConfig | None = None
    """The layout in which ISP shards the model; None: ISP does not run it."""


class Found(NamedTuple):
    """The results of a run that are compared with the plain model's."""

    outputs: dict[str, Tensor]
    """Logits and loss; or losses and gradient norms."""
    tensors: dict[str, Tensor]
    """Gradients, or weights after the steps, by name: whole, or this rank's shards."""
    lost: bool = False
    """Whether any bit of the weights changed when they were saved and loaded."""
    shard: dict[str, Callable[[Tensor], Tensor]] = {}  # noqa: RUF012
    """Functions from a whole tensor to this rank's shard, by name; empty if tensors are whole."""


Measure = Callable[[Case], Found]


class Differences(NamedTuple):
    """The largest differences of a run from the plain model."""

    outputs: float
    """Largest absolute difference of an output."""
    tensors: float
    """Largest absolute difference of an element of a gradient or weight."""
    relative: float
    """Largest difference of a tensor's element / the largest element of that tensor."""
    within: float
    """The smallest of `TOLERANCES` that all results are within, or infinity."""
    lost: bool
    """Whether any bit of the weights changed when they were saved and loaded."""


def make_config(name: str, *more: dict[str, Any]) -> Any:
    """Return the configuration of a model; later sizes replace earlier ones."""
    sizes = {k: v for part in (TESTER, MODELS[name], *more) for k, v in part.items()}
    known = inspect.signature(CONFIG_MAPPING[name].__init__).parameters
    return AutoConfig.for_model(name, **{k: v for k, v in sizes.items() if k in known})


def load(case: Case) -> Any:
    """Return the model of a case, sharded by transformers if the case says so."""
    how = {} if case.theirs is None else {"distributed_config": DistributedConfig(**case.theirs)}
    model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=case.dtype, **how)
    return kept_in_float64(model) if case.dtype == torch.float64 else model


def make_run(case: Case) -> ParallelRun:
    """Shard a case's model by ISP, with the optimizer (Adam) of transformers' FSDP tests."""
    assert case.ours is not None
    dtype: Any = str(case.dtype).removeprefix("torch.")
    config = JobConfig(
        model=ModelConfig(),
        data=DataConfig(source="none"),
        parallel=case.ours,
        training=TrainingConfig(dtype=dtype, max_norm=0.0),
    )
    adam = partial(torch.optim.Adam, lr=RATE)
    return parallelize(load(case), config, optimizer=adam)


def tokens(config: Any) -> Tensor:
    """Return random rows, the same on every rank.

    They are also the labels, as in the test classes of transformers that this program repeats.
    """
    return torch.randint(config.vocab_size, (BATCH, LENGTH), generator=torch.manual_seed(SEED))


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that transformers shards."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def logits_and_gradients(case: Case) -> Found:
    """Compute what transformers' tensor-parallel tests compare: logits, a loss, all gradients."""
    model: Any = load(case) if case.ours is None else make_run(case)
    ids = tokens((model if case.ours is None else model.model).config)
    if case.ours is None:
        with torch.no_grad():
            logits = whole(model.eval()(ids).logits)
        loss = model.train()(ids, labels=ids, use_cache=False).loss
        loss.backward()
        found = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        return Found({"logits": logits, "loss": whole(loss)}, found)
    with torch.no_grad():
        logits = model.eval().logits(ids)
    loss = model.train().loss(ids)
    model.backward(loss, last=True)
    # Call this for what it does besides: it sums the gradients over the ranks.
    model.grad_norm()
    items, gradients = model.train_step.built.trained, model.train_step.gradients
    found = {item.name: gradients.whole(item.parameter) for item in items}
    outputs = {"logits": logits, "loss": loss.detach()}
    return Found(outputs, found, shard={item.name: item.layout.shard for item in items})


def train(case: Case) -> Found:
    """Train as transformers' FSDP tests do: steps of Adam on one batch, saved and resumed halfway.

    The plain model, in one process, is trained without saving. transformers compares with DDP
    instead of it, where all ranks have the same batch, so the gradients are the same.
    """
    model: Any = load(case) if case.ours is None else make_run(case)
    sharded = dist.is_initialized()
    lost = sharded and not same_when_saved(model, case)
    losses, norms = [], []
    ids = tokens((model if case.ours is None else model.model).config)
    optimizer = None if case.ours else torch.optim.Adam(model.parameters(), lr=RATE)
    for step in range(STEPS):
        if step == STEPS // 2 and sharded:
            model, optimizer = resumed(model, optimizer, case)
        if optimizer is None:
            outcome = model.step(model.loss(ids))
            losses.append(torch.tensor(outcome.loss, dtype=torch.float64))
            norms.append(torch.tensor(outcome.grad_norm, dtype=torch.float64))
            continue
        optimizer.zero_grad()
        loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), math.inf)))
        optimizer.step()
        losses.append(whole(loss))
    outputs = {"losses": torch.stack(losses), "norms": torch.stack(norms)}
    if case.ours is None:
        return Found(outputs, {n: whole(p) for n, p in model.named_parameters()}, lost)
    model.train_step.drain()
    items = model.train_step.built.trained
    found = {item.name: item.parameter.detach() for item in items}
    return Found(outputs, found, lost, {item.name: item.layout.shard for item in items})


def export(model: Any, folder: str) -> None:
    """Write a sharded model as transformers does."""
    first = {"is_main_process": dist.get_rank() == 0} if isinstance(model, nn.Module) else {}
    model.save_pretrained(folder, **first)
    dist.barrier()


def same_when_saved(model: Any, case: Case) -> bool:
    """Return whether the exported weights equal those of the case's folder in every bit."""
    export(model, f"{case.work}/start")
    before, after = (load(Case(x, case.dtype)) for x in (case.folder, f"{case.work}/start"))
    pairs = zip(before.named_parameters(), after.named_parameters(), strict=True)
    return all(name == other and x.equal(y) for (name, x), (other, y) in pairs)


def resumed(model: Any, optimizer: Any, case: Case) -> tuple[Any, Any]:
    """Save model and optimizer, and return new ones that are loaded from that checkpoint."""
    folder, states = f"{case.work}/half", f"{case.work}/optimizer"
    if case.ours is not None:
        model.save(folder)
        run = make_run(case)
        run.load(folder)
        return run, None
    export(model, folder)
    their_checkpoints.save_optimizer_distributed(model, optimizer, states)
    dist.barrier()
    model = load(case._replace(folder=folder))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    their_checkpoints.load_optimizer_distributed(model, optimizer, states)
    return model, optimizer


def compare(rank: int, measure: Measure, case: Case, plain: Found) -> Differences:
    """Run a case on this rank, and compare it with the plain model."""
    return differences(measure(case), plain)


def differences(found: Found, plain: Found) -> Differences:
    """Compare a rank's results with the plain model's."""
    pairs = [(found.outputs[name], expected) for name, expected in plain.outputs.items()]
    outputs, relative = max(_apart(*pair) for pair in pairs), 0.0
    # A tensor that is 0 in exact arithmetic is only noise: do not divide by its own size.
    least = 1e-6 * max(x.abs().max().item() for x in plain.tensors.values())
    for name, value in found.tensors.items():
        expected = plain.tensors.get(name)
        # An expert without tokens has no gradient in the plain model, and zeros in a sharded one.
        if expected is None:
            pairs.append((value, torch.zeros_like(value)))
            continue
        pairs.append((value, found.shard[name](expected) if found.shard else expected))
        relative = max(relative, _apart(*pairs[-1]) / max(expected.abs().max().item(), least))
    if plain.tensors.keys() - found.tensors.keys():  # a missing tensor differs by infinity
        pairs.append((torch.ones(1), torch.full((1,), math.inf)))
    tensors = max(_apart(*pair) for pair in pairs[len(plain.outputs) :])
    within = (t for t in TOLERANCES if all(_close(*pair, t) for pair in pairs))
    return Differences(outputs, tensors, relative, next(within, math.inf), found.lost)


def _apart(found: Tensor, expected: Tensor) -> float:
    largest = (found - expected).abs().max().item() if found.numel() else 0.0
    return largest if math.isfinite(largest) else math.inf


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def layout(mode: Mode = Mode.ISP, tensor: int = 1, weight: int = 1, expert: int = 1) -> Any:
    return ParallelConfig(
        tensor=TensorConfig(size=tensor, mode=mode),
        weight=WeightConfig(size=weight),
        expert=ExpertConfig(size=expert),
    )


def contestants(which: str, config: Any) -> dict[str, dict[str, Any]]:
    """Return the ways to run a model on the ranks, by column of the table, as fields of `Case`."""
    if which == "fsdp":
        return {
            "transformers fsdp": {"theirs": {"fsdp_size": RANKS}},
            "isp weight 2": {"ours": layout(weight=RANKS)},
            "isp tensor 2, weight 2": {"ours": layout(tensor=RANKS, weight=RANKS)},
        }
    modes = (Mode.MTP, Mode.MSP, Mode.FSP)
    ways: dict[str, dict[str, Any]] = {"transformers tp": {"theirs": {"tp_size": RANKS}}}
    ways |= {f"isp {mode}": {"ours": layout(mode, RANKS)} for mode in modes}
    if getattr(config, "base_model_ep_plan", None) is not None:
        # transformers' tests set enable_expert_parallel instead. transformers 5.24 refuses that
        # key, as it finds no plan for the other weights.
        ways["transformers ep"] = {"theirs": {"tp_size": RANKS, "ep_size": RANKS}}
        ways["isp mtp, expert 2"] = {"ours": layout(Mode.MTP, RANKS, expert=RANKS)}
    return ways


def row_of(
    which: str, name: str, wanted: Collection[str] | None = None
) -> dict[str, list[Differences | str]]:
    """Return differences or an error, in float32 and float64, of all columns or those `wanted`."""
    measure = train if which == "fsdp" else logits_and_gradients
    config = make_config(name, *([FSDP_TESTER] if which == "fsdp" else []))
    row: dict[str, list[Differences | str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(SEED)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        cases = [Case(folder, dtype) for dtype in (torch.float32, torch.float64)]
        plain = [measure(case) for case in cases]
        for contestant, how in contestants(which, config).items():
            if wanted is None or contestant in wanted:
                own = [x._replace(work=f"{folder}/{contestant}/{x.dtype}", **how) for x in cases]
                pairs = zip(own, plain, strict=True)
                row[contestant] = [_on_ranks(measure, *pair) for pair in pairs]
    return row


def _on_ranks(measure: Measure, case: Case, plain: Found) -> Differences | str:
    """Return the largest differences of all ranks, or the last line of an error."""
    try:
        ranks = run_ranks(RANKS, compare, measure, case, plain, timeout_seconds=300.0)
    except RankError as error:
        return str(error).strip().splitlines()[-1]
    return Differences(*map(max, *ranks))


def cell(single: Differences | str, double: Differences | str) -> str:
    """Return the cell of a table for a run: differences, or "failed"."""
    if isinstance(single, str):
        return "failed"
    relative = "failed" if isinstance(double, str) else f"{double.relative:.0e}"
    faults = [f"within {single.within:.0e} only"] * (single.within > TOLERANCES[0])
    faults += ["weights lost"] * single.lost
    return ", ".join([f"{single.outputs:.0e}", f"{single.tensors:.0e}", relative, *faults])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"models to compare: {' '.join(MODELS)}"
    )
    parser.add_argument("--only", choices=["tp", "fsdp"], help="print only this table")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    bad, reasons = False, []
    for which in [asked.only] if asked.only else ["tp", "fsdp"]:
        columns = [*contestants(which, AutoConfig.for_model("mixtral"))]
        kinds = "weights" if which == "fsdp" else "gradients"
        print(
            f"\nlargest differences: outputs, {kinds} (both float32), {kinds} (float64, relative)"
        )
        print(f"\n| model | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|", sep="\n")
        for name in asked.names or MODELS:
            row = row_of(which, name)
            cells = [cell(*row[x]) if x in row else "" for x in columns]
            print(f"| {' | '.join([name, *cells])} |", flush=True)
            for contestant, found in row.items():
                errors = [error for error in found if isinstance(error, str)]
                reasons += [f"* {name}, {contestant}: {error}" for error in dict.fromkeys(errors)]
                worse = any(isinstance(x, str) or x.within > TOLERANCES[0] or x.lost for x in found)
                bad |= worse and contestant.startswith("isp")
    print("", *reasons, sep="\n")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())

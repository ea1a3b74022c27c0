"""Check that verl's engine `isp` trains as plain transformers does, on 4 gloo ranks.

    pip install verl peft  # in an environment of its own, with torch and ISP
    torchrun --nproc-per-node 4 tools/check_with_verl.py

Makes steps by verl's `train_batch` with its SFT loss, with 2 ranks a sequence and 2 data ranks, and
the same steps by AdamW on the plain model. Compares gradient norms and weights, then the results of
`infer_batch`, and the weights after loading a checkpoint of the first step.
"""

from __future__ import annotations

import copy
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils import tensordict_utils as tu
from verl.workers.engine.base import EngineRegistry
from verl.workers.utils.losses import sft_loss

from isp.integrations.verl import ISPEngineConfig
from isp.models.huggingface.tiny import kept_in_float64

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
CONFIG = "parallel: {tensor: {size: 2}, weight: {size: 4}}\ntraining: {dtype: float64}\n"
RATE, STEPS = 1e-2, 3
TOLERANCE = 1e-9


def batches(step: int) -> list[list[torch.Tensor]]:
    """Return the documents of a step for each of two data ranks."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(5, 12, (2, 4), generator=generator).tolist()
    return [[torch.randint(64, (n,), generator=generator) for n in of_rank] for of_rank in lengths]


def tensors(documents: list[torch.Tensor]) -> TensorDict:
    """Return a batch as verl sends it: two documents in a micro-batch, with prompts of 3 tokens."""
    jagged = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    masks = [(torch.arange(len(d)) >= 3).long() for d in documents]
    data = TensorDict(
        {
            "input_ids": jagged(documents),
            "position_ids": jagged([torch.arange(len(d)) for d in documents]),
            "loss_mask": jagged(masks),
        },
        batch_size=len(documents),
    )
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=2, temperature=1.0)
    return data


def plain_loss(model: Any, documents: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the losses of all tokens after the prompts."""
    losses = []
    for tokens in documents:
        logits = model(tokens[None]).logits[0, 2:-1]
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[3:], reduction="sum"))
    return torch.stack(losses).sum()


def plain(model: Any, steps: range, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train the plain model for `steps`, on the documents of both data ranks; return the norms."""
    norms = []
    for step in steps:
        documents = [d for of_rank in batches(step) for d in of_rank]
        loss = plain_loss(model, documents) / sum(len(d) - 3 for d in documents)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    return norms


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))
    with tempfile.TemporaryDirectory() as own:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        folder = Path(every[0])
        if dist.get_rank() == 0:
            model.save_pretrained(folder / "model")
            (folder / "isp.yaml").write_text(CONFIG)
        dist.barrier()
        check(kept_in_float64(copy.deepcopy(model)), folder)
        dist.barrier()


def check(model: Any, folder: Path) -> None:
    """Compare verl's engine with the plain `model`; raise AssertionError if they differ.

    `folder` has the same model and the configuration of ISP.
    """
    rule = SimpleNamespace(
        lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, clip_grad=1.0, total_training_steps=9,
        lr_warmup_steps=0, lr_warmup_steps_ratio=0.0,
    )  # fmt: skip
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="isp",
        model_config=SimpleNamespace(local_path=str(folder / "model"), path=None),
        engine_config=ISPEngineConfig(isp_config=str(folder / "isp.yaml")),
        optimizer_config=rule,
        checkpoint_config=None,
    )
    engine.initialize()
    optimizer = torch.optim.AdamW(
        model.parameters(), RATE, rule.betas, weight_decay=rule.weight_decay
    )
    worst = 0.0
    loss_function = partial(sft_loss, config=None)
    for step in range(STEPS):
        data = tensors(batches(step)[engine.get_data_parallel_rank()])
        with engine.train_mode():
            output = engine.train_batch(data, loss_function=loss_function)
        engine.lr_scheduler_step()
        (norm,) = plain(model, range(step, step + 1), optimizer)
        if engine.is_mp_src_rank_with_outputs():
            worst = max(worst, abs(output["metrics"]["grad_norm"] - norm))
        if step == 0:
            engine.save_checkpoint(str(folder / "saved"), global_step=1)
            after_one = {n: w.clone() for n, w in model.state_dict().items()}
    expected = model.state_dict()
    for name, weight in engine.get_per_tensor_param()[0]:
        worst = max(worst, (weight - expected[name]).abs().max().item())
    with engine.eval_mode():
        mine = batches(9)[engine.get_data_parallel_rank()]
        found = engine.infer_batch(tensors(mine))["model_output"]["log_probs"]
    for log_probs, tokens in zip(found.unbind(), mine, strict=True):
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        right = logits.gather(-1, tokens[1:, None])[:, 0]
        worst = max(worst, (log_probs[:-1] - right).abs().max().item())
    engine.load_checkpoint(str(folder / "saved"))
    for name, weight in engine.get_per_tensor_param()[0]:
        worst = max(worst, (weight - after_one[name]).abs().max().item())
    if dist.get_rank() == 0:
        print(f"{STEPS} steps: norms, weights, log-probabilities, checkpoint: within {worst:.1e}")
    assert worst < TOLERANCE, f"the largest difference is {worst:.1e}, above {TOLERANCE:.0e}"


if __name__ == "__main__":
    main()

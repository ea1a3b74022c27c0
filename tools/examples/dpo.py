"""Train by direct preference optimization (DPO), in your own loop and any layout.

    torchrun --nproc-per-node 4 tools/examples/dpo.py [CONFIG] [STEPS]

The policy and a frozen reference are a tiny Llama of transformers. In a pair, the second half of
the chosen row repeats its first half; that of the rejected row is random.
"""

import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import isp

BETA, PAIRS, HALF = 0.1, 4, 16
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}


def pairs(step: int, data_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return chosen rows, then rejected rows, [2 PAIRS, 2 HALF], and the mask of their answers."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    prompts, other = torch.randint(64, (2, PAIRS, HALF), generator=generator)
    rows = torch.cat([torch.cat([prompts, prompts], 1), torch.cat([prompts, other], 1)])
    answers = torch.zeros_like(rows, dtype=torch.bool)
    answers[:, HALF:] = True
    return rows, answers


def main(config: str, steps: int) -> list[float]:
    torch.manual_seed(0)  # every rank makes the same model
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))
    frozen = copy.deepcopy(model).requires_grad_(False)
    policy, reference = isp.parallelize(model, config), isp.parallelize(frozen, config)
    losses = []
    for step in range(steps):
        rows, answers = pairs(step, policy.dp_rank)
        labels = rows.masked_fill(~answers, -100)
        with torch.no_grad():
            before = reference.log_probs(rows, labels).log_probs.sum(1)
        gains = policy.log_probs(rows, labels).log_probs.sum(1) - before
        chosen, rejected = gains.chunk(2)
        loss = -F.logsigmoid(BETA * (chosen - rejected)).sum() / (PAIRS * policy.dp_size)
        policy.backward(loss)
        outcome = policy.step(lr=3e-3)
        losses.append(outcome.loss)  # all data ranks' sum: the mean of all pairs
        if policy.mesh.rank == 0:
            print(f"step {step}: loss {outcome.loss:.4f}  grad_norm {outcome.grad_norm:.3f}")
    return losses


if __name__ == "__main__":
    default = Path(__file__).parents[2] / "configs/quickstart.yaml"
    main(sys.argv[1] if sys.argv[1:] else str(default), int(sys.argv[2]) if sys.argv[2:] else 30)

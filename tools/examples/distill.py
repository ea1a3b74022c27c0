"""Distill a teacher's largest logits into a student, in your own loop and any layout.

    torchrun --nproc-per-node 4 tools/examples/distill.py [CONFIG] [STEPS]

Teacher and student are tiny Llamas of transformers; the student has half of the layers. It learns
the teacher's probabilities of the TOP tokens that the teacher finds most likely.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import isp

ROWS, LENGTH, TOP = 4, 32, 8
SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64}


def llama(num_layers: int) -> LlamaForCausalLM:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**SIZES, **heads, num_hidden_layers=num_layers, initializer_range=0.1)
    return LlamaForCausalLM(config)


def main(config: str, steps: int) -> list[float]:
    torch.manual_seed(0)  # every rank makes the same models
    frozen, model = llama(2).requires_grad_(False), llama(1)
    teacher, student = isp.parallelize(frozen, config), isp.parallelize(model, config)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + student.dp_rank)
        rows = torch.randint(64, (ROWS, LENGTH), generator=generator)
        with torch.no_grad():
            best = teacher.logits(rows, top_k=TOP)
        logits = student.logits(rows, best.indices)  # [ROWS, LENGTH, TOP]
        goal = best.values.softmax(-1)
        loss = F.kl_div(logits.log_softmax(-1), goal, reduction="sum")
        student.backward(loss / (rows.numel() * student.dp_size), last=True)
        outcome = student.step(lr=1e-2)
        losses.append(outcome.loss)  # all data ranks' sum: the mean of all tokens
        if student.mesh.rank == 0:
            print(f"step {step}: loss {outcome.loss:.4f}  grad_norm {outcome.grad_norm:.3f}")
    return losses


if __name__ == "__main__":
    default = Path(__file__).parents[2] / "configs/quickstart.yaml"
    main(sys.argv[1] if sys.argv[1:] else str(default), int(sys.argv[2]) if sys.argv[2:] else 30)

"""Train by transformers' `Trainer`, in any layout.

    torchrun --nproc-per-node 4 tools/examples/trainer.py [CONFIG] [STEPS]

Trains a tiny Llama of transformers on sequences of different lengths, which are padded.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from isp.integrations.transformers import Trainer

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}


def sequences(num: int, seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    halves = [torch.randint(1, 9, (6 + i % 5,), generator=generator) for i in range(num)]
    return [{"input_ids": half.repeat(2)} for half in halves]


def collate(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    rows = [each["input_ids"] for each in examples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    seen = ids != 0
    return {"input_ids": ids, "labels": ids.masked_fill(~seen, -100), "attention_mask": seen}


def main(config: str, steps: int) -> list[float]:
    torch.manual_seed(0)  # every rank makes the same model
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=4,
            gradient_accumulation_steps=2, learning_rate=1e-2, lr_scheduler_type="cosine",
            logging_steps=1, save_strategy="no", report_to="none",
            use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            model=model, args=args, data_collator=collate, isp_config=config,
            train_dataset=sequences(512, 0), eval_dataset=sequences(32, 1),
        )  # fmt: skip
        trainer.train()
        print(trainer.evaluate())
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


if __name__ == "__main__":
    default = Path(__file__).parents[2] / "configs/quickstart.yaml"
    main(sys.argv[1] if sys.argv[1:] else str(default), int(sys.argv[2]) if sys.argv[2:] else 40)

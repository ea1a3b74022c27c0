"""Compare the loss of TRL's DPOTrainer with the same loss computed from `run.log_probs`.

    torchrun --nproc-per-node 4 tools/check_with_trl.py  # trl 1.16, in an environment of its own

Both compute the sigmoid and the ipo loss of one padded batch in float32; TRL with plain copies of
the model and of the reference on every rank. Then prints what happens when TRL's trainers are
combined with `TrainerMixin`: they are refused.
"""

import copy
import os
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import isp
from isp.integrations.transformers import TrainerMixin
from isp.loop.parallel_run import ParallelRun

BETA, PAIRS, LENGTH, PROMPT, TOLERANCE = 0.1, 3, 20, 6, 1e-6
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
WORDS = {f"w{i}": i for i in range(64)}


def model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))


def batch() -> dict[str, torch.Tensor]:
    """Return chosen rows, then rejected rows, each [2 PAIRS, LENGTH], as TRL's collator does."""
    ids = torch.randint(3, 64, (2 * PAIRS, LENGTH), generator=torch.Generator().manual_seed(7))
    places = torch.arange(LENGTH)
    seen = places < torch.tensor([20, 13, 17, 9, 20, 15])[:, None]
    answers = seen & (places >= PROMPT)
    return {"input_ids": ids * seen, "attention_mask": 1 * seen, "completion_mask": 1 * answers}


def of_trl(kind: str, folder: str, tokenizer: PreTrainedTokenizerFast) -> float:
    """Return the DPO loss of type `kind` by TRL."""
    args = DPOConfig(
        output_dir=folder, loss_type=[kind], beta=BETA, use_cpu=True, report_to="none", bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    texts = {"prompt": ["w3 w4"], "chosen": ["w5 w6"], "rejected": ["w7"]}
    trainer = DPOTrainer(
        model=model(0), ref_model=model(1), args=args, processing_class=tokenizer,
        train_dataset=Dataset.from_dict(texts),
    )  # fmt: skip
    trainer.model.train()
    return float(trainer.compute_loss(trainer.model, batch()))


def of_run(kind: str, policy: ParallelRun, reference: ParallelRun) -> float:
    """Return the DPO loss of type `kind` from the log-probabilities of ISP's runs."""
    given = batch()
    answers = given["completion_mask"].bool()
    labels = given["input_ids"].masked_fill(~answers, -100)
    rows = {"labels": labels, "attention_mask": given["attention_mask"]}
    with torch.no_grad():
        before = reference.log_probs(given["input_ids"], **rows).log_probs.sum(1)
    gains = policy.log_probs(given["input_ids"], **rows).log_probs.sum(1) - before
    if kind == "ipo":
        gains = gains / answers.sum(1)
    chosen, rejected = gains.chunk(2)
    if kind == "ipo":
        return float(((chosen - rejected - 1 / (2 * BETA)) ** 2).mean())
    return float(-F.logsigmoid(BETA * (chosen - rejected)).mean())


def tried(kind: str, config: str, folder: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """Train by TRL's trainer combined with `TrainerMixin`; return "trains", or why it refused."""
    whole, settings = (SFTTrainer, SFTConfig) if kind == "sft" else (DPOTrainer, DPOConfig)
    args = settings(
        output_dir=folder, max_steps=2, use_cpu=True, report_to="none", bf16=False,
        gradient_checkpointing=False, save_strategy="no",
    )  # fmt: skip
    texts = {"prompt": ["w3 w4"] * 16, "chosen": ["w5 w6"] * 16, "rejected": ["w7"] * 16}
    given = {"ref_model": model(1)} if kind == "dpo" else {}
    texts = texts if kind == "dpo" else {"text": texts["chosen"]}
    try:
        type(kind, (TrainerMixin, whole), {})(
            model=model(0), args=args, processing_class=tokenizer, isp_config=config,
            train_dataset=Dataset.from_dict(texts), **given,
        ).train()  # fmt: skip
    except ValueError as error:
        return f"refused: {error}"
    return "trains"


def main() -> None:
    config = str(Path(__file__).parents[1] / "configs/quickstart.yaml")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(WORDS, unk_token="w2")),
        eos_token="w1", pad_token="w0", unk_token="w2",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        expected = {kind: of_trl(kind, folder, tokenizer) for kind in ("sigmoid", "ipo")}
        policy = isp.parallelize(model(0), config)
        reference = isp.parallelize(copy.deepcopy(model(1)).requires_grad_(False), config)
        for kind, loss in expected.items():
            apart = abs(of_run(kind, policy, reference) - loss) / abs(loss)
            assert apart < TOLERANCE, (kind, apart)
            if os.environ["RANK"] == "0":
                print(f"{kind}: loss {loss:.7f}, relative difference {apart:.1e}")
        for kind in ("sft", "dpo"):
            said = tried(kind, config, folder, tokenizer)
            if os.environ["RANK"] == "0":
                print(f"TRL's {kind} trainer with TrainerMixin: {said}")


if __name__ == "__main__":
    main()

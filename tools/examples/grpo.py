"""Group relative policy optimization in your own loop, over any layout.

    torchrun --nproc-per-node 4 tools/examples/grpo.py [CONFIG] [STEPS]

A tiny Llama answers prompts, `GROUP` times each; the reward is the share of even tokens. Rollouts
are by `generate` of a plain copy on every rank, which `run.named_weights` keeps up to date.
"""

import copy
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import isp

PROMPTS, GROUP, LENGTH, ANSWER, UPDATES, CLIP, KL = 2, 8, 8, 8, 2, 0.2, 0.02
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}


def main(config: str, steps: int) -> list[float]:
    torch.manual_seed(0)  # every rank makes the same model
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))
    actor, frozen = copy.deepcopy(model).eval(), copy.deepcopy(model).requires_grad_(False)
    policy, reference = isp.parallelize(model, config), isp.parallelize(frozen, config)
    rewards = []
    for step in range(steps):
        actor.load_state_dict(dict(policy.named_weights(torch.float32)), strict=False)
        torch.manual_seed(1000 * step + policy.dp_rank)  # the ranks of a sequence sample the same
        prompts = torch.randint(64, (PROMPTS, LENGTH)).repeat_interleave(GROUP, 0)
        rows = actor.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True,
            max_new_tokens=ANSWER, min_new_tokens=ANSWER, top_k=0, pad_token_id=0,
        )  # fmt: skip
        reward = (rows[:, LENGTH:] % 2 == 0).float().mean(1)
        std, mean = torch.std_mean(reward.view(PROMPTS, GROUP), 1, keepdim=True)
        gain = ((reward.view(PROMPTS, GROUP) - mean) / (std + 1e-4)).view(-1, 1)  # [rows, 1]
        labels = rows.clone()
        labels[:, :LENGTH] = -100
        with torch.no_grad():
            fixed = reference.log_probs(rows, labels).log_probs
            before = policy.log_probs(rows, labels).log_probs
        num_tokens = policy.count(labels != -100)
        for _ in range(UPDATES):
            found = policy.log_probs(rows, labels).log_probs  # 0 where there is no label
            ratio, change = (found - before).exp(), fixed - found
            clipped = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
            loss = -(clipped - KL * (change.exp() - change - 1))[:, LENGTH:].sum() / num_tokens
            policy.backward(loss)
            policy.step(lr=3e-3)
        rewards.append((policy.count(reward) / policy.count(torch.ones_like(reward))).item())
        if policy.mesh.rank == 0:
            print(f"step {step}: reward {rewards[-1]:.3f}")
    return rewards


if __name__ == "__main__":
    default = Path(__file__).parents[2] / "configs/quickstart.yaml"
    main(sys.argv[1] if sys.argv[1:] else str(default), int(sys.argv[2]) if sys.argv[2:] else 30)

"""Use sharded weights and Ulysses attention in your own model; compare it with plain torch.

torchrun --nproc-per-node 4 tools/examples/own_model.py
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import isp

D, HEADS, TOKENS = 32, 4, 16
torch.set_default_dtype(torch.float64)


def local_attention(q: Tensor, k: Tensor, v: Tensor, *, mask: isp.AttentionMask) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, S, H, d] -> [B, H, S, d]
    return F.scaled_dot_product_attention(q, k, v, is_causal=mask.causal).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, linear, attend) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(D), attend
        self.qkv, self.out = linear(D, 3 * D), linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return x + self.out(self.attend(q, k, v, mask=isp.AttentionMask()).flatten(2))


dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
weight = isp.Channel.from_group(dist.group.WORLD)  # weights are sharded over all ranks
communicator = isp.ISPCommunicator(weight, isp.ISPCommModelConfig(device=torch.device("cpu")))
linear = partial(isp.ISPLinear, communicator=communicator)
attend = isp.DistributedAttention(local_attention, isp.Channel.from_mesh(mesh, "sequence"))
torch.manual_seed(0)  # every rank draws the same weights as the plain model below
model = nn.Sequential(Layer(linear, attend), Layer(linear, attend))
communicator.declare([isp.weight_blocks(model, model)])
torch.manual_seed(0)
plain = nn.Sequential(Layer(nn.Linear, local_attention), Layer(nn.Linear, local_attention))
x = torch.randn(2, TOKENS, D)  # two sequences, each on two ranks
own = x.chunk(2)[mesh.get_local_rank("data")].chunk(2, 1)[mesh.get_local_rank("sequence")]
communicator.begin(isp.sequential_actions(1))  # launches the first all-gathers
loss = model(own).square().sum() / x.numel()
loss.backward()
communicator.finish()  # now p.grad is complete: this rank's rows, summed over all ranks
isp.sum_gradients(model, weight)  # sums the norms' gradients: norms are not sharded
expected = plain(x).square().mean()
expected.backward()
torch.testing.assert_close(weight.all_reduce(loss.detach()).wait(), expected.detach())
for name, full in plain.named_parameters():
    want = full.grad if "norm" in name else full.grad.chunk(4)[weight.rank]
    torch.testing.assert_close(model.get_parameter(name).grad, want)
print(f"rank {dist.get_rank()}: loss {expected:.6f}, the same gradients as plain torch")
dist.destroy_process_group()

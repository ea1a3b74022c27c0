"""Compare a training step of ISP's decoder on one rank with the same model in plain torch.nn.

    python tools/bench_world1.py --rounds 15

Both train on the same batch. They take turns, a step each, and another one begins each round. A
step is forward, backward, clipping and AdamW, in float32 on CPU with one thread. Before anything
is timed, the losses of three steps have to agree.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from table_parser import table_parser
from torch import Tensor, nn

from isp.core.comm import Mesh
from isp.core.layers.rotary import RotaryEmbedding
from isp.core.mesh.config import ParallelConfig
from isp.core.mesh.topology import Topology
from isp.core.micro_batch import MicroBatch
from isp.core.optim.config import OptimizerConfig
from isp.core.optim.main_grads import MainGradients
from isp.core.optim.zero1 import Zero1Optimizer
from isp.models.build import build_model
from isp.step.train_step import TrainStep
from model.build import language_model
from model.config import ModelConfig

COLUMNS = """\
loss differs by   the largest difference of the losses of three steps
wall ms, plain    median time of a step in plain torch
wall ratio        median over rounds of ISP's time / plain torch's
processor ratio   the same of processor time, which other programs disturb less
"""
SIZES = {
    "quickstart": ModelConfig(
        vocab_size=272,
        hidden_size=160,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=432,
    ),
    "hidden 512": ModelConfig(
        vocab_size=8192,
        hidden_size=512,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        intermediate_size=1408,
    ),
}
ADAMW = OptimizerConfig(lr=1e-3)
MAX_NORM = 1.0
TOLERANCE = 1e-5
"""The largest difference of float32 losses: sums are in another order."""
Step = Callable[[], float]
"""Makes a training step and returns its loss."""


class PlainBlock(nn.Module):
    """A Llama block in plain torch modules, without optimizations."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv, self.d = c.num_heads, c.kv_heads, c.head_size
        self.attention_norm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.wqkv = nn.Linear(c.hidden_size, (self.heads + 2 * self.kv) * self.d, bias=False)
        self.wo = nn.Linear(self.heads * self.d, c.hidden_size, bias=False)
        self.ffn_norm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.w13 = nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
        self.w2 = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.wqkv(self.attention_norm(x)).unflatten(-1, (-1, self.d)).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv, self.kv), dim=1)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        gate, up = self.w13(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.w2(F.silu(gate) * up)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to the two halves of each head."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Plain(nn.Module):
    """ISP's decoder in plain torch modules: q, k and v are one linear, and so are gate and up."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(PlainBlock(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.norm_eps)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.rotary = RotaryEmbedding(c.head_size, base=c.rope_theta)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        cos, sin = (torch.cat((x, x), dim=-1).unsqueeze(1) for x in self.rotary(positions))
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def steps_of(config: ModelConfig, batch: MicroBatch) -> tuple[Step, Step]:
    """Build ISP's training step, as the trainer does, and that of the plain model.

    Both start from the same weights.
    """
    mesh = Mesh(Topology.create(1, ParallelConfig()), 0)
    device = torch.device("cpu")
    model = language_model(config, "float32")
    built = build_model(model, ParallelConfig(), mesh, seed=0, device=device, dtype=torch.float32)
    parameters = list(built.parameters)
    plain = Plain(config)
    own = dict(plain.named_parameters())
    assert sum(p.numel() for p in own.values()) == model.num_parameters
    with torch.no_grad():
        # Copy ISP's weights into the plain model. A fused linear of it holds several of ISP's
        # weights, one below the other; `first` is where this one begins.
        for item in parameters:
            name, first, _ = model.earlier_names[item.name]
            whole = own[name.replace("attention.w", "w").replace("feed_forward.", "")]
            whole[first : first + len(item.parameter)].copy_(item.parameter)
    gradients = MainGradients(parameters, mesh)
    optimizer = Zero1Optimizer(gradients, mesh, ADAMW, max_norm=MAX_NORM)
    train_step = TrainStep(built, gradients, optimizer, mesh, micro_num=1)
    # Weight decay applies to matrices only, as in ISP.
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in own.values() if p.dim() > 1]},
            {"params": [p for p in own.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=ADAMW.lr,
        betas=(ADAMW.beta1, ADAMW.beta2),
        eps=ADAMW.eps,
        weight_decay=ADAMW.weight_decay,
        fused=True,
    )

    def theirs() -> float:
        adamw.zero_grad()
        logits = plain(batch.tokens, batch.positions)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(own.values(), MAX_NORM)
        adamw.step()
        return loss.item()

    return lambda: train_step([batch], ADAMW.lr).loss, theirs


def timed(step: Step) -> tuple[float, float]:
    """Make a step; return its seconds of wall time and of processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = table_parser(__doc__, COLUMNS)
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of the batch")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--profile", action="store_true", help="show where both spend their time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(COLUMNS)
    print("| model | loss differs by | wall ms, plain | wall ratio | processor ratio |")
    print("|---|---|---|---|---|")
    for name in options.sizes:
        torch.manual_seed(0)
        tokens = torch.randint(SIZES[name].vocab_size, (1, options.seq_len + 1))
        positions = torch.arange(options.seq_len).unsqueeze(0)
        batch = MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, None)
        pair = steps_of(SIZES[name], batch)
        off = max(abs(pair[0]() - pair[1]()) for _ in range(3))
        assert off <= TOLERANCE, f"{name}: the losses differ by {off}"
        rounds = []
        for index in range(options.rounds):
            first = index % 2
            times = [timed(pair[first]), timed(pair[1 - first])]
            # The order of timing alternates; the result is always (ours, plain).
            rounds.append((times[first], times[1 - first]))
        wall, cpu = (statistics.median(a[i] / b[i] for a, b in rounds) for i in (0, 1))
        plain_ms = 1e3 * statistics.median(b[0] for _, b in rounds)
        print(f"| {name} | {off:.1e} | {plain_ms:.0f} | {wall:.3f} | {cpu:.3f} |", flush=True)
        if options.profile:
            for who, step in zip(("ours", "plain"), pair, strict=True):
                with torch.profiler.profile() as profile:
                    step()
                table = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=14)
                print(f"{who}\n{table}")


if __name__ == "__main__":
    main()

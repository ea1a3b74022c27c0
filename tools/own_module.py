"""`ISPCommunicator` with a module of one's own: weights gathered ahead, gradients reduced behind.

    python tools/own_module.py
    torchrun --nproc-per-node 2 tools/own_module.py      # the same losses

Layers come from a `LayerFactory`; the model declares where a forward reads their weights. A
parameter is this rank's shard, so any optimizer of torch trains it.
"""

import torch
from torch import Tensor, nn

from isp import ISPCommModelConfig, ISPCommunicator
from isp.comm import Mesh, World
from isp.layers.factory import LayerFactory
from isp.layers.module import bind_names, init_weights
from isp.parallel import Axis, LaunchPoint, Mode, ParallelConfig, Topology, WeightConfig
from isp.weights.declare import DeclaredBlock, DeclaredUse


class Block(nn.Module):
    """Two linears, [.., 64] -> [.., 64]."""

    def __init__(self, layers: LayerFactory) -> None:
        super().__init__()
        self.up, self.down = layers.column(64, (256,), std=0.1), layers.row(256, 64, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))

    def uses(self) -> tuple[DeclaredUse, ...]:
        """Where a forward reads weights, in order; the next block's are requested before `down`."""
        up = DeclaredUse(name="up", layer=self.up)
        return up, DeclaredUse(name="down", layer=self.down, launch_point=LaunchPoint.WO)


def main() -> None:
    """Train for three steps on a batch that the ranks share."""
    device = torch.device("cpu")
    with World(device) as world:
        sizes = ParallelConfig(weight=WeightConfig(size=world.size))
        mesh = Mesh(Topology.create(world.size, sizes), world.rank)
        communicator = ISPCommunicator(mesh[Axis.WEIGHT], ISPCommModelConfig(device=device))
        layers = LayerFactory(
            mode=Mode.ISP,
            tensor=mesh[Axis.TENSOR],
            weight=mesh[Axis.WEIGHT],
            communicator=communicator,
            device=device,
            dtype=torch.float32,
        )
        model = nn.Sequential(*(Block(layers) for _ in range(4)))
        bind_names(model)
        init_weights(model, seed=1)  # the same weights on any number of ranks
        blocks = [
            DeclaredBlock(name=name, module=block, uses=block.uses())
            for name, block in model.named_children()
        ]
        communicator.declare([blocks])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # of this rank's shards
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
        for step in range(3):
            own = batch[world.rank :: world.size]
            loss = (model(own) - own.roll(1, -1)).square().sum() / batch.numel()
            loss.backward()
            communicator.finish()  # gradients, summed over the ranks, are in `.grad`
            optimizer.step()
            optimizer.zero_grad()
            total = mesh[Axis.WORLD].all_reduce(loss.detach()).wait()
            if world.rank == 0:
                print(f"step {step}: loss {total:.4f}")


if __name__ == "__main__":
    main()

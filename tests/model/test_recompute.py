"""The decoder's ways of recomputing: the same bits in every mode, and what each of them saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from isp.comm import Mesh
from isp.models.build import BuiltModel, build_model
from isp.parallel import (
    Axis,
    Mode,
    ParallelConfig,
    TensorConfig,
    Topology,
    WeightConfig,
)
from model.config import ModelConfig
from tests.ranks import run_ranks
from tests.saved import saved_bytes

CPU = torch.device("cpu")
S, D, F, LAYERS = 16, 32, 40, 3
SIZES: dict[str, Any] = {
    "vocab_size": 52,
    "hidden_size": D,
    "num_layers": LAYERS,
    "num_heads": 4,
    "intermediate_size": F,
    "qkv_bias": True,
    "init_std": 0.3,
}
PARTS = {"checkpoint_norm_outputs": True, "checkpoint_mlp_activation": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "norms": {"checkpoint_norm_outputs": True},
    "activation": {"checkpoint_mlp_activation": True},
    "both": PARTS,
    "both, some blocks": {**PARTS, "checkpoint": 0.3},
    "both, all but attention": {**PARTS, "checkpoint": 0.3, "checkpoint_keeps_attention": True},
    "whole": {"checkpoint": 1.0},
    "distributed": {"checkpoint": 1.0, "checkpoint_distribute_activations": True},
    "distributed, some blocks": {
        **PARTS,
        "checkpoint": 0.3,
        "checkpoint_keeps_attention": True,
        "checkpoint_distribute_activations": True,
    },
}
LAYOUTS = [(Mode.MTP, 4, 1), (Mode.MSP, 4, 1), (Mode.FSP, 4, 1), (Mode.ISP, 4, 4), (Mode.ISP, 2, 4)]


def _fits(name: str, mode: Mode) -> bool:
    return mode is Mode.MTP or "distributed" not in name


def _parallel(mode: Mode, tensor: int, weight: int) -> ParallelConfig:
    return ParallelConfig(
        tensor=TensorConfig(size=tensor, mode=mode), weight=WeightConfig(size=weight)
    )


def _build(mesh: Mesh, options: dict[str, Any], parallel: ParallelConfig) -> BuiltModel:
    config = ModelConfig(**SIZES, **options)
    config.check_layout(parallel, S)
    return build_model(config, parallel, mesh, seed=5, device=CPU, dtype=torch.float64)


def _step(built: BuiltModel, mesh: Mesh) -> tuple[list[Tensor], int]:
    """The loss and every gradient of this rank, and the bytes that forward saved."""
    model, tensor = built.chunks[0], mesh[Axis.TENSOR]
    generator = torch.Generator().manual_seed(mesh[Axis.DATA].rank)
    rows = torch.randint(52, (2, 1, S), generator=generator)  # tokens, labels
    tokens, labels = rows
    positions, one = torch.arange(S)[None], torch.ones(())
    if mesh.topology.mode is Mode.ISP:
        tokens, labels, positions = (
            x.chunk(tensor.size, 1)[tensor.rank] for x in (tokens, labels, positions)
        )
    loss, saved = saved_bytes(lambda: model.loss(model(tokens, positions, None), labels, one))
    loss.backward()
    if built.communicator is not None:
        built.communicator.finish()
    grads = [p.grad for p in model.parameters()]
    assert all(g is not None for g in grads)
    return [loss.detach(), *(g for g in grads if g is not None)], saved


def _gathers(built: BuiltModel, mesh: Mesh) -> list[str]:
    """The weights gathered in the last step, in alphabetical order."""
    labels = [t.label for t in mesh.log.take() if t.kind == "all_gather"]
    return sorted(label for label in labels if label.endswith(".weight"))


def _all_layouts(rank: int) -> dict[tuple[str, str], tuple[bool, int, bool]]:
    """Per layout and option: whether it gave the same bits, the bytes saved, the same gathers."""
    found = {}
    for mode, tensor, weight in LAYOUTS:
        parallel = _parallel(mode, tensor, weight)
        mesh = Mesh(Topology.create(4, parallel), rank)
        expected, gathers = None, None
        for name, options in OPTIONS.items():
            if not _fits(name, mode):
                continue
            built = _build(mesh, options, parallel)
            mesh.log.collect()
            numbers, saved = _step(built, mesh)
            weights = _gathers(built, mesh)
            expected, gathers = expected or numbers, gathers or weights
            same = all(torch.equal(a, b) for a, b in zip(numbers, expected, strict=True))
            found[f"{mode} {tensor}", name] = same, saved, weights == gathers
    return found


def test_recomputing_changes_no_bit_in_any_mode() -> None:
    """Catches parts restored too late or wrongly, a phase that the communicator is not told of, and
    weights that are gathered again for a part that has none.
    """
    of_ranks = run_ranks(4, _all_layouts, timeout_seconds=100)
    table = "\n".join(
        f"{layout:<6} {name:<26} {saved:>8} bytes"
        for (layout, name), (_, saved, _) in of_ranks[0].items()
    )
    print(f"\nsaved by the forward of rank 0\n{table}")
    for found in of_ranks:
        assert [key for key, (same, _, _) in found.items() if not same] == []
        assert [key for key, (_, _, gathers) in found.items() if not gathers] == []
        for mode, tensor, _ in LAYOUTS:
            layout = f"{mode} {tensor}"
            saved = {name: found[layout, name][1] for name in OPTIONS if _fits(name, mode)}
            assert saved["activation"] < saved["nothing"]
            assert saved["both"] < saved["activation"]
            assert saved["both, some blocks"] < saved["both"]
        inputs = LAYERS * S * D * 8
        whole, distributed = found["mtp 4", "whole"][1], found["mtp 4", "distributed"][1]
        assert whole - distributed == inputs * 3 // 4


def _saved(options: dict[str, Any]) -> int:
    parallel = _parallel(Mode.MTP, 1, 1)
    mesh = Mesh(Topology.create(1, parallel), 0)
    return _step(_build(mesh, options, parallel), mesh)[1]


def test_what_each_option_saves() -> None:
    """Catches an option that is wired to nothing, or keeps what it promises to drop."""
    saved = {name: _saved(options) for name, options in OPTIONS.items()}
    activation = LAYERS * S * F * 8
    assert saved["nothing"] - saved["activation"] == activation, "the product"
    norms = 2 * LAYERS * (_norm_bytes() + S * D * 8)
    assert saved["nothing"] - saved["norms"] == norms, "what both keep inside, and what they give"
    assert saved["nothing"] - saved["both"] == norms + activation


def _norm_bytes() -> int:
    """What a norm saves beside its input."""
    mesh = Mesh(Topology.create(1, _parallel(Mode.MTP, 1, 1)), 0)
    model = _build(mesh, {}, _parallel(Mode.MTP, 1, 1)).chunks[0]
    x = torch.randn(1, S, D, dtype=torch.float64, requires_grad=True)
    return saved_bytes(lambda: model.norm(x))[1] - S * D * 8


@pytest.mark.parametrize("mode", [Mode.MSP, Mode.FSP, Mode.ISP])
def test_only_replicated_activations_are_distributed(mode: Mode) -> None:
    """Catches pieces of different tokens that would be put together as one input."""
    config = ModelConfig(**SIZES, **OPTIONS["distributed"])
    with pytest.raises(ValueError, match="checkpoint_distribute_activations is for mtp mode"):
        config.check_layout(_parallel(mode, 4, 4), S)
    config.check_layout(_parallel(Mode.MTP, 4, 4), S)


def test_sizes_and_switches_that_do_not_fit_are_refused() -> None:
    """Catches a switch that does nothing, and elements that do not divide."""
    with pytest.raises(ValueError, match=r"set model.checkpoint above 0"):
        ModelConfig(**SIZES, checkpoint_distribute_activations=True)
    odd = {**SIZES, "hidden_size": 33, "num_heads": 8, "head_dim": 8}
    config = ModelConfig(**odd, checkpoint=1.0, checkpoint_distribute_activations=True)
    with pytest.raises(ValueError, match=r"size=8 must divide the 5 tokens of a row times .*=33"):
        config.check_layout(_parallel(Mode.MTP, 8, 1), 5)

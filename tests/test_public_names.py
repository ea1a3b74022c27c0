"""The public names: where they are listed, that they exist and are documented."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import isp

PUBLIC = ["isp.tensor_parallel", "isp.data_parallel", "isp.metrics", "isp.profile"]
INTEGRATIONS = {
    "isp.integrations.accelerate": "accelerate",
    "isp.integrations.transformers": "transformers",
    "isp.integrations.verl": "verl",
}
"""Integration modules, and the package that each needs."""

SEED_SURFACE = {
    "isp": """
        DistributedAttention EmbeddingWeightParallelCommunicator HeadWeightParallelCommunicator
        ISPCommModelConfig ISPCommunicator ISPCommunicatorSchedulerHook ISPCommunicatorWrapper
        ISPOverlapState MemoryPool SeqAllToAll WPCommunicator
    """,
    "isp.tensor_parallel": """
        CheckpointWithoutOutput ColumnParallelLinear InferenceLayerNormColumnParallelLinear
        InferenceRowParallelLinear RngStatesTracker RowParallelLinear VocabParallelEmbedding
        VocabUtility all_gather_last_dim_from_tensor_parallel_region all_to_all all_to_all_hp2sp
        all_to_all_sp2hp broadcast_data checkpoint copy_to_tensor_model_parallel_region
        gather_from_sequence_parallel_region gather_from_tensor_model_parallel_region
        gather_split_1d_tensor model_parallel_manual_seed reduce_from_tensor_model_parallel_region
        reduce_scatter_last_dim_to_tensor_parallel_region
        reduce_scatter_to_sequence_parallel_region scatter_to_sequence_parallel_region
        scatter_to_tensor_model_parallel_region split_tensor_along_last_dim
        split_tensor_into_1d_equal_chunks vocab_parallel_cross_entropy
    """,
    "isp.data_parallel": "BucketManager DataParallelBucket DataParallelNaive",
}
"""The names that users of InternEvo, Megatron-LM and picotron know."""

MEMBERS = {
    "isp.ISPCommunicator": """
        communication_mode grad_hook register_prerequisite_for_forward_prefetch_hooks
        switch_current_model_chunk weight_hook
    """,
    "isp.MemoryPool": "reset_lazy_pools",
    "isp.DistributedAttention": "__call__ from_kv from_qkv",
    "isp.tensor_parallel.RngStatesTracker": "add fork get_states set_states",
    "isp.data_parallel.DataParallelBucket": "no_sync reset",
}
"""Their methods and attributes."""


def _type_checking_block() -> dict[str, list[str]]:
    """Return the names that `isp/__init__.py` imports for type checkers, by module."""
    tree = ast.parse(Path(isp.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert isinstance(block.test, ast.Name)
    assert block.test.id == "TYPE_CHECKING"
    found: dict[str, list[str]] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        assert all(alias.asname == alias.name for alias in node.names), "else it is not re-exported"
        found[str(node.module)] = [alias.name for alias in node.names]
    return found


def test_the_lists_of_public_names_agree() -> None:
    """Catches a name that can be imported but has no type, or the reverse."""
    assert _type_checking_block() == isp._NAMES
    assert isp.__all__ == sorted(name for names in isp._NAMES.values() for name in names)
    assert set(isp.__all__) <= set(dir(isp))


@pytest.mark.parametrize("name", isp.__all__)
def test_public_names_of_isp_exist_and_are_documented(name: str) -> None:
    """Catches a name that has moved, and one without a docstring."""
    found = getattr(isp, name)
    assert (found.__name__, found.__module__) == (name, isp._HOMES[name])
    assert found.__doc__


@pytest.mark.parametrize("module", [*PUBLIC, *INTEGRATIONS])
def test_names_in_all_exist_and_are_documented(module: str) -> None:
    """Catches a name in `__all__` that is gone, or has no docstring."""
    if module in INTEGRATIONS:
        pytest.importorskip(INTEGRATIONS[module])
    public = importlib.import_module(module)
    assert public.__all__
    for name in public.__all__:
        found = getattr(public, name)
        assert not callable(found) or (found.__doc__ and found.__name__ == name), name


@pytest.mark.parametrize("module", SEED_SURFACE)
def test_known_names_have_a_public_path(module: str) -> None:
    """Catches a name known from other frameworks that is no longer public."""
    assert set(SEED_SURFACE[module].split()) <= set(importlib.import_module(module).__all__)


@pytest.mark.parametrize("path", MEMBERS)
def test_known_names_have_their_members(path: str) -> None:
    """Catches a method known from other frameworks that is gone."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert set(MEMBERS[path].split()) <= set(dir(found))


def test_isp_attention_stays_a_function() -> None:
    """Catches a package of the same name, which an import elsewhere would put in its place."""
    import isp.core.attention.api
    from isp import attention

    assert attention is isp.attention is isp.core.attention.api.attention
    assert callable(attention)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """Catches another error for a misspelled name than `hasattr` and import expect."""
    with pytest.raises(AttributeError, match="nothing"):
        isp.nothing  # noqa: B018

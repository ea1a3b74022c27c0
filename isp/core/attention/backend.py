"""The backends of attention on a rank (`model.attention_backend`).

This file loads no torch: configurations are read before torch is imported.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["AttentionBackend"]


class AttentionBackend(StrEnum):
    """The implementation that computes attention on a rank."""

    AUTO = "auto"
    """The fastest backend available: timed at the start on CUDA; with deterministic algorithms,
    the first that works, in the order of expected speed on the device."""
    SDPA = "sdpa"
    """torch's scaled dot product attention, document by document; the only backend on CPU."""
    CUDNN = "cudnn"
    """torch's scaled dot product attention by cuDNN, or by another kernel where cuDNN has none."""
    VARLEN = "varlen"
    """torch.nn.attention.varlen."""
    FLASH2 = "flash2"
    """The flash_attn package."""
    FLASH3 = "flash3"
    """flash_attn_interface, FlashAttention-3 for Hopper."""
    FLASH4 = "flash4"
    """flash_attn.cute, FlashAttention-4 for Hopper and Blackwell."""

    @property
    def package(self) -> str | None:
        """The package that contains the backend; None if torch contains it."""
        return _PACKAGES.get(self, (None, ""))[0]

    @property
    def remedy(self) -> str:
        """The command or hint that installs the backend's package; empty: torch contains it."""
        return _PACKAGES.get(self, (None, ""))[1]

    def check_fits(self, device: str, dtype: str, *, deterministic: bool) -> None:
        """Raise ValueError if the backend cannot compute in `dtype` on this type of `device`.

        `deterministic`: torch's deterministic algorithms are on, which cuDNN's kernel refuses.
        """
        anywhere = self in (AttentionBackend.AUTO, AttentionBackend.SDPA)
        if not anywhere and (device == "cpu" or dtype not in ("bfloat16", "float16")):
            raise ValueError(
                f"model.attention_backend={self} needs bfloat16 or float16 on a CUDA device, not"
                f" {dtype} on {device}: use model.attention_backend=sdpa or auto, or another"
                f" training.dtype or training.device"
            )
        if self is AttentionBackend.CUDNN and deterministic:
            raise ValueError(
                "model.attention_backend=cudnn is not deterministic, so torch refuses it with"
                " training.deterministic=true: use model.attention_backend=auto"
            )


_PACKAGES = {
    AttentionBackend.FLASH2: ("flash_attn", "pip install flash-attn --no-build-isolation"),
    AttentionBackend.FLASH3: (
        "flash_attn_interface",
        "build it in the `hopper` folder of github.com/Dao-AILab/flash-attention",
    ),
    AttentionBackend.FLASH4: ("flash_attn", "pip install 'flash-attn-4>=4b1'"),
}

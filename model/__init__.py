"""Decoder-only language models (Llama / InternLM2 / Qwen family) over the layers of `isp`."""

"""Decoder-only language models of the Llama, InternLM2 and Qwen families, and their presets."""

"""Text to micro-batches: sources, tokenizers, the `.bin`/`.idx` format, packing and sampling."""

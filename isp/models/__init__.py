"""Models in plain PyTorch, made parallel: traced once, then run as they are, for each rank."""

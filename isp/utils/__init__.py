"""Files, text, limits and packages: helpers that import nothing of ISP and not torch."""

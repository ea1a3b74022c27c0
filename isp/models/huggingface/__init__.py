"""Models of transformers: their configurations, files, weights, and the code that ISP replaces."""

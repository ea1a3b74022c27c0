"""Experts: gathered as weights or sent their tokens; their load, losses and adapters."""

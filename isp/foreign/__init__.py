"""Doors to what others wrote: their files, their code, their text; no package is imported."""

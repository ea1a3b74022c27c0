"""Small copies of models, for checks on a CPU."""

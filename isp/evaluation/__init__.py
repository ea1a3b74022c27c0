"""Trained models measured on long text."""

"""Weights in the files and modules of a model."""

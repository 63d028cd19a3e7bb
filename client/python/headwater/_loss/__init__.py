"""Micro-batches: their losses, terms and ids."""

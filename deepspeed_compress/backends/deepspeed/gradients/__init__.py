"""Seams at which DeepSpeed reduces gradients, one module per reduction path."""

"""Seams at which DeepSpeed gathers weights, and access to the fp32 master weights."""

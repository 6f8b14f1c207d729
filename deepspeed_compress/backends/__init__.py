"""Engines that the package attaches to, one package each, and what they share. Only `deepspeed` needs DeepSpeed."""

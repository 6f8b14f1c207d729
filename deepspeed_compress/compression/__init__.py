"""Tensors in, bytes out, and what is remembered between messages: no network, no configuration."""

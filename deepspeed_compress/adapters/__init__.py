"""Engines other than DeepSpeed: each has one file that takes its buckets to a session, and none needs DeepSpeed."""

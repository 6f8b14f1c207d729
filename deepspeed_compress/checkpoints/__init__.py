"""Checkpoints that training does not wait for: snapshots in memory, a process that writes them, and what is whole."""

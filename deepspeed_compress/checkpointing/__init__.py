"""Checkpoints that do not block training: snapshots in memory, a writer process, and tracking of completeness."""

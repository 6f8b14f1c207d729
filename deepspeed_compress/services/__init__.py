"""Processes beside the ranks: what starts them again, and where islands meet."""

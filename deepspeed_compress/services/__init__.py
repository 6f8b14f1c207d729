"""Processes next to the ranks: agents that restart them, and services through which islands find each other."""

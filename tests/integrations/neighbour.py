"""Module that `script.py` imports from its own directory."""


def row(start: int) -> list[int]:
    return [(start + offset) % 64 for offset in range(16)]

"""Tests. A package, so that no other `tests` on the path of a machine hides them."""

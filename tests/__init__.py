"""Tests. This is a package, so that no other `tests` on the path hides it."""

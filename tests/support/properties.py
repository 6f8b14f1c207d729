"""Settings of property tests: the same examples on every run, and no deadline on a busy machine."""

from hypothesis import settings

properties = settings(deadline=None, max_examples=50, derandomize=True, database=None)

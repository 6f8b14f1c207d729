"""Directory in `PYTHONPATH` of the processes that a program under `ds-compress run` starts; see `install`."""

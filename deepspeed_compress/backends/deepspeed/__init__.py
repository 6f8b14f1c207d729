"""DeepSpeed support: the entry points, and the seams at which the package attaches to an engine, one module each."""

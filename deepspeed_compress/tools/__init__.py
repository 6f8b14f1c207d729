"""Programs beside training, each loaded when its command is given: `ds-compress lint`, `doctor`, `tune` ..."""

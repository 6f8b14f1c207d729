"""Programs other than training, each imported when its command is called: `ds-compress lint`, `doctor`, `tune` etc."""

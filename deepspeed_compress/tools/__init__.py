"""Command-line tools, each imported when its command is called: `ds-compress lint`, `doctor`, `tune`, and so on."""

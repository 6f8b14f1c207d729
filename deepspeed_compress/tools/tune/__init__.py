"""`ds-compress tune`: short real trials of methods and settings, and the fastest that does not cost loss."""

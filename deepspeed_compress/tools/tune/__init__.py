"""`ds-compress tune`: short real trials of methods and settings, to find the fastest that does not harm the loss."""

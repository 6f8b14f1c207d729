"""DeepSpeed: the entry points that attach to it, and its seams, one file each."""

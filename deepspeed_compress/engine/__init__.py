"""DeepSpeed's seams, one file each, and the entry points that attach to them (`attach`)."""

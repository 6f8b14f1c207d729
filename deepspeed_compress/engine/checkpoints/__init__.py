"""DeepSpeed's checkpoints with our state beside: in the call or behind training, of other sizes, from memory."""

"""Where DeepSpeed gathers weights, and the masters that they come from."""

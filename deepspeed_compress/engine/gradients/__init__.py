"""Where DeepSpeed reduces gradients: a file for each way."""

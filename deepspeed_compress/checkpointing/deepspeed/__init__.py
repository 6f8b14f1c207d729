"""DeepSpeed checkpoints with compression state: written in the call or in the background, resized, kept in memory."""

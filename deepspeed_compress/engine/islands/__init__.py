"""Islands under DeepSpeed: one job that is divided, or jobs that come and go."""

"""Islands under DeepSpeed: one job that is divided, or jobs that join and leave."""

"""Agent of a host, which starts the ranks of a job, and restarts them when a rank or a host is lost."""

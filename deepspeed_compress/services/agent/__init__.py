"""The agent of a host: starts the ranks of a job, and starts them again when one of them, or a host, is lost."""

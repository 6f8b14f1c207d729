"""Ranks for tests: as threads where gloo is enough, as forked processes where DeepSpeed is needed."""

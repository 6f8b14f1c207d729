"""Adapters for engines other than DeepSpeed. Each passes the engine's buckets to a session; none needs DeepSpeed."""

"""Compression of what ranks with different parts of a model send: the parts that know no engine."""

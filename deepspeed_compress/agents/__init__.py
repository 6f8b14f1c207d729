"""Training of a language model as an agent's policy: an endpoint with versions, and GRPO on an engine."""

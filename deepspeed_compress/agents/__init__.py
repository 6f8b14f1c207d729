"""Training of a language model as an agent's policy: sampling, an endpoint with versions, and GRPO on an engine."""

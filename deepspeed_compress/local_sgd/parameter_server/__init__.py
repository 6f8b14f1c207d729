"""Parameter server for asynchronous islands, which push weight changes and pull the anchor; and its clients."""

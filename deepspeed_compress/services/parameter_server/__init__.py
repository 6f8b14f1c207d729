"""Where asynchronous islands push what they have moved and pull what all have found: one server, and its clients."""

"""Where islands that come and go meet: who is there, who takes part in an exchange, whether it counts. No torch."""

"""Rendezvous of islands that join and leave: membership, rounds of exchange, and their commitment. No torch."""

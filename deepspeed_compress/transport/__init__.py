"""One framed, authenticated transport for every TCP service of the package. Standard library only, no torch.

Both sides prove that they know a shared secret before any JSON is read (`handshake`); a frame is a JSON head and a body
whose sizes are checked against limits before memory is allocated for them (`frames`); every read and write has a
deadline (`connection`). A `server.Server` runs one thread for each authenticated connection and a selector for all
others; a client calls `client.connect`. `docs/security.md` says what this protects and what it does not.
"""

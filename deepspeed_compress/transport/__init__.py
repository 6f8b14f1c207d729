"""One framed, authenticated transport for every TCP service of the package. No torch.

Both sides prove that they know a shared secret before any JSON is read (`handshake`); a frame is a JSON head and a body
whose sizes are checked against limits before memory is allocated for them, and every read and write has a deadline
(`connection`); `messages` checks what a head contains. A `server.Server` has a thread for each connection, a
`machine_server.MachineServer` serves a state machine, and a client calls `client.connect`. `docs/security.md` says what
this protects and what it does not.
"""

"""What a session is made of, whichever engine trains: reducers in force, memories, figures. No DeepSpeed here."""

"""Parts of a session that are the same for every engine: reducers in force, residuals, figures. No DeepSpeed here."""

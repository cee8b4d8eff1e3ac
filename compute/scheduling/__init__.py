"""Pure scheduling policies: facts and `now` in, choices out. No clock, task or client in here."""

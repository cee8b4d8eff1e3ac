"""What exists: one file per asset family, and how a step's report becomes events."""

"""What clients speak: one module per dialect, from a request to a `ChatCall` and back to an answer."""

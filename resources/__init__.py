"""Dagster's handles: addresses, and the objects of `compute` that they lead to."""

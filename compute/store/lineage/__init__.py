"""Lineage of a run: the index that seals and compaction keep, and every question asked of it."""

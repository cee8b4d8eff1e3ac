"""Processes: who starts them, watches them, and makes sure that none is left behind."""

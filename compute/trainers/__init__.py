"""Losses, the torch replica, and the process that serves its verbs."""

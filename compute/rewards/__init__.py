"""Rewards: from what a reward function returns to one status and value per call."""

"""Kills of the real conductor on real files, and what must hold after each of them."""

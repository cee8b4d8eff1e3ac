"""Advantages on plain floats; pure."""

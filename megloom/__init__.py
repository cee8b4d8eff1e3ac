"""Megloom: multi-agent reinforcement learning of language models, orchestrated from Dagster."""

__version__ = "0.1.0"

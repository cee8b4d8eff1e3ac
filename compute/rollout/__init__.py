"""Workload workers: the processes that run user code, and what they exchange with the conductor."""

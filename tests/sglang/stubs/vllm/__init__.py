"""Stands in for vLLM on a CPU, where SGLang imports one function of it: see `_custom_ops`."""

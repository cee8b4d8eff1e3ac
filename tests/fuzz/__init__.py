"""Hostile requests against whole services: short in `make test`, long in `make fuzz`."""

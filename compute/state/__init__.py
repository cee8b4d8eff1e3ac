"""Location-agnostic state: weight versions and durable files."""

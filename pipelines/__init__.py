"""The wiring: definitions, jobs, schedules, sensors. No logic."""

"""One file per trained system: what a user writes."""

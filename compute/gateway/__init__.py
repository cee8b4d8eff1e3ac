"""The HTTP front for agents and finished agent programs: exact tokens behind the field's usual endpoints."""

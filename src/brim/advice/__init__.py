"""Pure rules over records: what to choose, and why."""

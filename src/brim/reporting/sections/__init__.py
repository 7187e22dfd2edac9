"""Sections that pages of several kinds have: the machine over time, a batch-size search, how to repeat the run."""

"""Metrics: scores of predictions against references, one file per topic. Pure functions, no torch."""

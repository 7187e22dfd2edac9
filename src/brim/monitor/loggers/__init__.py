"""Loggers: where the figures of runs go besides their folder. One file for each library."""

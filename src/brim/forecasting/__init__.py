"""Bytes before running: the byte model that probes and traces feed."""

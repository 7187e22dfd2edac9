"""Flags and files to checked settings; no torch."""

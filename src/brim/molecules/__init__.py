"""Preference training on features: energies that rank in-distribution samples below out-of-distribution ones."""

"""Probe, search and plan: from a workload and a memory limit to a batch size with its evidence."""

"""Runs work in batches: every item once, costliest first, splitting on OOM, growing back, journalling."""

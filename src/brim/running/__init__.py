"""Runs work in batches: every item once, dearest first, splitting on OOM, growing back, journalling."""

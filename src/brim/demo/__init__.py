"""A small real model and its data, shipped so that every command can be tried on any machine without a download."""

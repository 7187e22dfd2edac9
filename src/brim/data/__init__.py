"""Data sets as samples: one file per format, found by what a path holds; nothing is downloaded."""

"""The detectors that people compare with, on the same features; one file for each family."""

"""Sweeps: many training runs from one file, each in a process of its own."""

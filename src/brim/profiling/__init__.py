"""Accuracy, speed and memory over the values of a knob."""

"""Comparisons: settings measured in turns, their intervals, a recommendation, and the folder that keeps it all."""

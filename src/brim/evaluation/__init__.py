"""Evaluations: a model, a data set, a task and its metrics, every sample once."""

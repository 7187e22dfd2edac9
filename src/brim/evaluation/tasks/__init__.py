"""What a model is asked to do with a sample, one file per task."""

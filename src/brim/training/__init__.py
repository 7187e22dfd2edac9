"""Training: the user's effective batch in micro-batches that fit, found and kept by the run itself."""

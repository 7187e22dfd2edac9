"""Tasks: what a model is asked to do with a sample, one file per task, and how samples become its inputs."""

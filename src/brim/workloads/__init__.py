"""What runs on one batch: the `Workload` protocol, its knobs, and the kinds forward, generate and train."""

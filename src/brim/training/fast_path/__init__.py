"""Small models: data on the device, runs of many seeds stacked into one, whole steps as CUDA graphs."""

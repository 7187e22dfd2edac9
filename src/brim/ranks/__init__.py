"""Who this process is, how ranks agree, and how one works alone: the only user of torch.distributed."""

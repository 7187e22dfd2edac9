"""What records of runs say: whether a run was in order, what would make it faster, and what that brought."""

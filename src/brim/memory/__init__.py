"""What memory there is on each device, and what happens when it runs out."""

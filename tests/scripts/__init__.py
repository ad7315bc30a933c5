"""Training scripts as people have them, under DDP, `compress` and `distribute`."""

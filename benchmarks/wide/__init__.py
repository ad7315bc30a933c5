"""Training between sites: what a slow link with latency leaves of a step, of the time to a loss, and of the loss."""

"""What gaia is made of: the significance filter, and the slow link between two sites."""

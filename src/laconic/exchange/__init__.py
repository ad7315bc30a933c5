"""Where codec, schedule and transport meet: the collectives a user calls."""

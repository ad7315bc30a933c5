"""A run's record, metrics and interruptions, and the claims that follow from them."""

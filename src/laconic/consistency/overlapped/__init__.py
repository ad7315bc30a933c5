"""Synchronous training whose exchange goes on under backward, the optimiser and the next forward."""

"""Runs whose workers are replaced when they die."""

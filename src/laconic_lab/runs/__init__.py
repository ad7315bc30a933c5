"""Runs: trainings and comparisons, from what the user asks for to the record and the report."""

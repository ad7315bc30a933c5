"""Predictions beside measurements and beside what was published."""

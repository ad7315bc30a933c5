"""WHAT IT GAVE: what is measured, on what, and how it is reported."""

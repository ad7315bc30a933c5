"""Failures looked for at random: property tests, damaged payloads and files."""

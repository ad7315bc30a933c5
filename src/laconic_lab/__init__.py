"""WHAT IT GAVE: runs, benchmarks and emulated clusters, and their records and reports."""

"""Everything that measures, by topic: `python -m benchmarks` lists it. To add a benchmark, add a file with a `main`."""

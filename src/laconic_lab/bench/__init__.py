"""Benchmarks and checks of the product, called by `laconic bench` and `laconic probe`."""

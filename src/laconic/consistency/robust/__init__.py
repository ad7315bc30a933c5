"""Robust aggregation: rules that make one vector of n, up to f of which may be anything. Pure functions."""

"""Robust aggregation: rules that combine n vectors, up to f of them arbitrary. Pure functions."""

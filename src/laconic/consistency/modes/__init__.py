"""The consistency modes, by family: every file here is registered automatically."""

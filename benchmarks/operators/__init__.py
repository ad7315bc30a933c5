"""Convolutions and recurrent layers by every method, beside torch."""

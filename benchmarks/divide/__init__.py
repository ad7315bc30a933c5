"""Models divided over hosts, beside torch's own divisions."""

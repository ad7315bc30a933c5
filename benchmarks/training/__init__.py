"""Whether networks and distributed training compute what they should."""

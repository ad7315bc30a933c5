"""When workers agree: modes beside each other, faults, sites, members that come and go."""

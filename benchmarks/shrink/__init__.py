"""How small models ship, and how quickly they load and run."""

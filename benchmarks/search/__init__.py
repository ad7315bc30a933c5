"""How good searches are: methods on published tables, populations, cost, real searches, kills."""

"""Charts, tables and pictures of the documentation, drawn from the records."""

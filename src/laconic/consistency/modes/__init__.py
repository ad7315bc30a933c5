"""The consistency modes, by family: a mode is known as soon as its file is here."""

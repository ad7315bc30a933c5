"""WHAT IS SENT: every published way of saying less, behind one small interface (see `base.py`)."""

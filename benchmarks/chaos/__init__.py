"""Kills, stops, cuts, full disks, strangers and damaged files, over every engine and every mode: `make chaos`.

A scenario is data (`scenario.py`); its job is real processes (`launch.py`, which run `program.py`); each kind of fault
is a file of `faults/`; what was promised is in `promises.py`, and `judge.py` says what to call what happened.
"""

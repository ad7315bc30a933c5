"""Kills, stops, cuts, full disks, strangers, damage and forgery, through every door, at every phase: `make chaos`.

A scenario is data (`scenario.py`): a fault × a door × a phase. A door is a file of `doors/`, a fault one of `faults/`,
a phase a line of `phases.py`; adding one is adding it there. Jobs are real processes (`launch.py` starts them,
`program.py` is what they run). What was promised is in `promises.py`; `judge.py` says what to call what happened.
"""

"""What a run has to tell: its record, its metrics, its interruptions and what may be claimed of it."""

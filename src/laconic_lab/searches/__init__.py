"""Searches of workloads: a trial is a run of the laboratory; what was found is drawn and trained again."""

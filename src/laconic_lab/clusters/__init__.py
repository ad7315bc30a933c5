"""Where processes run: emulated clusters on this machine, and jobs that a launcher started."""

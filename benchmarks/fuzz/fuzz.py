"""Look for failures at random, for as long as is asked: new examples of property tests, damage and forgeries.

    python -m benchmarks fuzz [--minutes 10] [--seed N]

`make test` draws the same examples in every run; this draws others. Each turn has a seed, which is printed first: with
`--seed` the same turn is done again, and a failing property test prints its example besides.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

PROPERTIES = ["-m", "pytest", "-x", "-n", "2", "--dist", "loadfile", "-m", "hypothesis", "--hypothesis-profile=random"]
MUTATIONS = 2_000  # of each codec in a turn: about as long as the property tests


def turn(seed: int, ends: float | None) -> bool | None:
    """Run property tests and fuzzing once with `seed`; whether all was well, None if `ends` came before."""
    commands = (
        [*PROPERTIES, f"--hypothesis-seed={seed}"],
        ["-m", "benchmarks", "fuzz-codecs", "--mutations", str(MUTATIONS), "--seed", str(seed)],
        ["-m", "benchmarks", "fuzz-shrink", "--mutations", str(MUTATIONS), "--seed", str(seed)],
        ["-m", "benchmarks", "fuzz-state", "--mutations", str(MUTATIONS), "--seed", str(seed)],
    )
    for command in commands:
        process = subprocess.Popen([sys.executable, *command], start_new_session=True)
        try:
            if process.wait(None if ends is None else max(0.0, ends - time.monotonic())) != 0:
                return False
        except subprocess.TimeoutExpired:
            return None
        finally:  # the time is over, or Ctrl-C: pytest's workers end with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="do one turn again; its time is not bounded by --minutes")
    options = parser.parse_args(arguments)
    ends, turns = time.monotonic() + 60 * options.minutes, 0
    while options.seed is None or turns == 0:
        seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
        print(f"fuzz: turn {turns + 1}, seed {seed}", flush=True)
        well = turn(seed, ends if options.seed is None else None)
        if well is None:
            break
        if not well:
            print(f"fuzz: a failure; again with: python -m benchmarks fuzz --seed {seed}", flush=True)
            return 1
        turns += 1
    print(f"fuzz: {turns} whole turn(s), no failure", flush=True)
    return 0

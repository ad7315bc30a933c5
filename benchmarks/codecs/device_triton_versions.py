"""Whether every kernel compiles under the oldest and the newest Triton that supported versions of torch bring.

    python -m benchmarks device-triton-versions

Each version is installed without its dependencies into a folder of its own below `.cache`, and compiles in a process of
its own beside this environment's torch. Compiled, not run: there is no device here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from laconic_lab.environment import environment

RESULTS = Path(__file__).parents[1] / "results" / "device_triton_versions.json"
CACHE = Path(__file__).parents[2] / ".cache" / "triton-versions"
ARCHITECTURES = ("sm_80", "sm_90", "sm_120", "gfx942")
VERSIONS = ("3.2.0", "3.7.1")  # what torch 2.6 and torch 2.13 bring

_PROGRAM = """
import dataclasses, json, sys, triton
from laconic.codecs.device.kernels.ahead import compile_for, variants

assert triton.__version__ == sys.argv[1], triton.__version__
for variant in variants():
    row = {"kernel": variant.name, "architecture": sys.argv[2], "error": "the compiler aborts"}
    print(json.dumps(row), flush=True)
    try:
        row |= dataclasses.asdict(compile_for(variant, sys.argv[2])) | {"error": ""}
    except Exception as error:
        row["error"] = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    print(json.dumps(row), flush=True)
"""


def main(output: Annotated[Path, typer.Option(help="Where the record goes.")] = RESULTS) -> None:
    """Compile every kernel by every version for every architecture, and keep what came of it."""
    versions = {version: _compiled(version) for version in VERSIONS}
    record = {"environment": environment(), "versions": versions}
    output.write_text(json.dumps(record, indent=1) + "\n")
    typer.echo(table(record))


def _compiled(version: str) -> list[dict[str, Any]]:
    folder = CACHE / version
    if not (folder / "triton").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, f"triton=={version}"], check=True, timeout=900)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "cache")}
    rows: list[dict[str, Any]] = []
    for architecture in ARCHITECTURES:
        command = [sys.executable, "-c", _PROGRAM, version, architecture]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900, check=False)
        found = {row["kernel"]: row for row in map(json.loads, done.stdout.splitlines())}
        if not found:
            raise RuntimeError(f"Triton {version} for {architecture}: {done.stderr[-2000:]}")
        rows += found.values()
    return rows


def table(record: dict[str, Any]) -> str:
    """One row a version: of each architecture, how many kernels compile without spilled registers."""
    rows = [row for found in record["versions"].values() for row in found]
    architectures = list(dict.fromkeys(row["architecture"] for row in rows))
    lines = [f"| Triton | {' | '.join(architectures)} |", "|---|" + "---|" * len(architectures)]
    for version, found in record["versions"].items():
        cells = []
        for architecture in architectures:
            own = [row for row in found if row["architecture"] == architecture]
            good = [row for row in own if not row["error"] and not row["spilled"]]
            why = {row["error"] for row in own if row["error"]}
            cells.append(f"{len(good)} of {len(own)}" if not why else f"{len(good)}: {'; '.join(sorted(why))}")
        lines.append(f"| {version} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "Kernels that compile ahead of time, nothing spilled. Compiled, not run."])

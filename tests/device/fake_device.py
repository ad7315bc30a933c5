"""The fake device: built once a source by the C++ compiler, loaded into processes of its own as torch's `fakegpu`.

torch knows one such device a process, and takes it for the accelerator from then on: never load it into a process
that runs other tests.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import types
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("fake_device.cpp")
NAME = "fakegpu"
COMPILER = os.environ.get("CXX", "g++")


def compiler() -> str | None:
    """Where the C++ compiler is, if there is one."""
    return shutil.which(COMPILER)


def build() -> Path:
    """The compiled device; builds it where nobody has."""
    said = f"{torch.__version__} {sysconfig.get_config_var('EXT_SUFFIX')}".encode()
    key = hashlib.sha256(SOURCE.read_bytes() + said).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", SOURCE.parents[2] / ".cache")) / "fake_device"
    cache.mkdir(parents=True, exist_ok=True)
    library = cache / f"{NAME}-{key}.so"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    includes = [*include_paths(), sysconfig.get_paths()["include"]]
    part = library.with_suffix(".part")
    command = [
        COMPILER, "-shared", "-fPIC", "-std=c++20", "-O0", "-w", f"-DTORCH_EXTENSION_NAME={NAME}",
        *(f"-I{path}" for path in includes), str(SOURCE), "-o", str(part),
        *(f"-L{path}" for path in library_paths()), "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"the fake device does not compile:\n{done.stderr[-3000:]}")
    part.replace(library)


def load() -> Any:
    """Let this process have the device; returns its controls: `slow_fill`, `counts`, …"""
    torch.utils.rename_privateuse1_backend(NAME)
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None
    assert spec.loader is not None
    controls = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(controls)
    module = types.ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        current_device=controls.current_device,
        set_device=lambda device: controls.set_device(torch.device(device).index or 0),
        manual_seed_all=lambda seed: None,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return controls

"""Source files as LLVM IR text: C, C++ and OpenCL through clang, text and bitcode through llvmlite.

Callers: `graph.read`, the tasks. LLVM itself reads and verifies every file, and what is handed on is what it prints:
one form, whatever version wrote the file. Text of another version is taken through an installed `llvm-as`.

Invariant: a compiler is given only the files the user named, ends by a deadline, and its output is never run.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laconic.errors import BadInput, MissingExtra

SOURCES = {".c": "c", ".cc": "c++", ".cpp": "c++", ".cxx": "c++", ".cl": "cl"}
IR = (".ll", ".bc")
SECONDS = 30.0  # a deadline of one compilation; ordinary files take a tenth of a second
_INCLUDES = re.compile(rb"include|import|embed")
_VERSIONS = range(30, 13, -1)
_PRINT = """
import sys, llvmlite.binding as binding
module = binding.parse_bitcode(sys.stdin.buffer.read())
module.verify()
sys.stdout.buffer.write(str(module).encode())
"""


@dataclass(frozen=True)
class Dialect:
    """How sources are compiled, beyond their language.

    Args:
        prelude: a header that is put before every source; it is precompiled once, for programs without their includes.
        standard: of the language, such as gnu++98; "" for clang's own.
    """

    prelude: Path | None = None
    standard: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w+:.]*", self.standard):
            raise BadInput(f"a standard is a word such as gnu++98, got {self.standard!r}")
        if self.prelude is not None and not self.prelude.is_file():
            raise BadInput(f"the prelude {self.prelude} is no file")

    @property
    def options(self) -> tuple[str, ...]:
        return (f"-std={self.standard}",) if self.standard else ()

    def fingerprint(self, language: str) -> str:
        """What of it decides the IR, for the key of a cache."""
        content = contents(self.prelude, f"{language}-header", Dialect(None, self.standard)) if self.prelude else b""
        return f"{self.standard} {hashlib.sha256(content).hexdigest()}"


PLAIN = Dialect()


def is_readable(path: Path) -> bool:
    """Whether the name's ending is one that `read_ir` takes."""
    return path.suffix.lower() in (*SOURCES, *IR)


def read_ir(path: str | Path, seconds: float = SECONDS, dialect: Dialect = PLAIN) -> str:
    """The IR of a file, as today's LLVM prints it.

    Raises:
        BadInput: the file is missing, does not compile, is no IR, or needs a tool that is not installed.
        MissingExtra: llvmlite is not installed.
    """
    path = Path(path)
    if not is_readable(path):
        raise BadInput(f"{path}: expected a file that ends in {', '.join((*SOURCES, *IR))}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    if path.suffix.lower() in SOURCES:
        return _printed(_compiled(path, seconds, dialect), path)
    if path.suffix.lower() == ".bc" or content[:2] == b"BC":
        return _printed_apart(content, path, seconds)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is no IR text: {error}") from error
    return read_text(text, str(path), seconds)


def read_text(text: str, name: str = "the text", seconds: float = SECONDS) -> str:
    """IR text as today's LLVM prints it; text of an older LLVM goes through `llvm-as` where one is installed."""
    binding = _binding()
    try:
        return _verified(binding.parse_assembly(text))
    except RuntimeError as error:
        first = _first_line(str(error))
    assembler = find("llvm-as")
    if assembler is None:
        raise BadInput(f"{name} is not IR of this LLVM ({first}); install an older llvm-as, such as Debian's llvm-14")
    code, output, complaint = _run([assembler, "-o", "-", "-"], text.encode(), seconds, name)
    if code:
        raise BadInput(f"{name} cannot be read: {_unread(complaint)}")
    return _printed(output, name)


@functools.cache
def find(tool: str) -> str | None:
    """The program `tool`, plain or with a version from 14 on behind its name; None when none is installed."""
    names = (tool, *(f"{tool}-{version}" for version in _VERSIONS))
    return next((found for name in names if (found := shutil.which(name))), None)


def contents(path: Path, language: str | None, dialect: Dialect = PLAIN) -> bytes:
    """A file and, for a source, all that it includes but for the system's headers: for the key of a cache.

    Clang is asked for their names, unless the text can include nothing.

    Raises:
        BadInput: one of them cannot be read, or is not there.
    """
    try:
        found = path.read_bytes()
        if language is None or not _INCLUDES.search(found):
            return found
        listed = os.fsdecode(_clang_says(["-MM"], path, language, dialect, SECONDS)).partition(": ")[2]
        _itself, *others = re.split(r"(?<!\\)\s+", listed.replace("\\\n", " ").strip())
        names = (re.sub(r"\\(.)|\$(\$)", r"\1\2", each) for each in others)
        return b"".join([found, *(Path(name).read_bytes() for name in names)])
    except OSError as error:
        raise BadInput(f"{error.filename} cannot be read: {error.strerror}") from error


def _compiled(path: Path, seconds: float, dialect: Dialect) -> bytes:
    return _clang_says(["-emit-llvm", "-c"], path, SOURCES[path.suffix.lower()], dialect, seconds)


def _clang_says(asked: Sequence[str], path: Path, language: str, dialect: Dialect, seconds: float) -> bytes:
    header = _precompiled(dialect, language, seconds)
    include = ["-include-pch", header] if header else []
    options = [*_options(language.removesuffix("-header"), dialect), *include, *asked, "-x", language, "-o", "-"]
    code, output, complaint = _run([_clang(path), *options, str(path.resolve())], b"", seconds, str(path))
    if code:
        raise BadInput(f"{path} does not compile: {_complaint(complaint)}")
    return output


def _clang(path: Path) -> str:
    clang = find("clang")
    if clang is None:
        raise BadInput(f"{path}: clang is not installed; install clang 14 or later, or give its IR as .ll or .bc")
    return clang


def _options(language: str, dialect: Dialect) -> list[str]:
    found = ["-O1", "-w", "-Wno-return-type", *dialect.options]
    if language == "cl":
        found += ["-cl-std=CL1.2", "-Xclang", "-finclude-default-header", "--target=spir64"]
    return found


def prepare(dialect: Dialect, suffixes: Iterable[str], seconds: float = SECONDS) -> None:
    """Compile the prelude for every language among `suffixes`, so that a bad one is one error and not one a file."""
    for language in sorted({SOURCES[suffix] for suffix in suffixes if suffix in SOURCES}):
        _precompiled(dialect, language, seconds)


@functools.cache
def _precompiled(dialect: Dialect, language: str, seconds: float) -> str | None:
    """The prelude as clang reads it fastest, in a folder that lasts as long as the process."""
    if dialect.prelude is None:
        return None
    output = Path(_folder().name) / f"{hashlib.sha256(f'{language} {dialect}'.encode()).hexdigest()}.pch"
    options = [*_options(language, dialect), "-x", f"{language}-header", "-o", str(output)]
    path = dialect.prelude
    code, _, complaint = _run([_clang(path), *options, str(path.resolve())], b"", seconds, str(path))
    if code:
        raise BadInput(f"the prelude {path} does not compile: {_complaint(complaint)}")
    return str(output)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="laconic-prelude-")


def _complaint(said: str) -> str:
    errors = [line for line in said.splitlines() if "error" in line]
    return _first_line(errors[0] if errors else said)


def _run(command: Sequence[str], given: bytes, seconds: float, name: str) -> tuple[int, bytes, str]:
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise BadInput(f"{name}: {Path(command[0]).name} was not done after {seconds:g} s") from None
    return done.returncode, done.stdout, done.stderr.decode(errors="replace")


def _printed(bitcode: bytes, name: str | Path) -> str:
    try:
        return _verified(_binding().parse_bitcode(bitcode))
    except RuntimeError as error:
        raise BadInput(f"{name} is not bitcode that this LLVM reads: {_first_line(str(error))}") from error


def _printed_apart(bitcode: bytes, name: Path, seconds: float) -> str:
    """The same for bitcode from elsewhere, in a process of its own: LLVM aborts its process on some damaged files."""
    _binding()
    code, output, complaint = _run([sys.executable, "-P", "-c", _PRINT], bitcode, seconds, str(name))
    if code:
        why = "LLVM gave up" if code < 0 else _first_line(complaint.strip().rpartition("RuntimeError: ")[2])
        raise BadInput(f"{name} is not bitcode that this LLVM reads: {why}")
    return output.decode()


def _verified(module: Any) -> str:
    module.verify()
    return str(module)


def _binding() -> Any:
    try:
        import llvmlite.binding as binding
    except ImportError as error:
        raise MissingExtra("llvmlite", "code") from error
    return binding


def _unread(complaint: str) -> str:
    """What the assembler says of the statement it stopped at, and the statement."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    said = re.sub(r"^.*?error: ", "", lines[0]) if lines else "llvm-as failed"
    return f"{said}, in {lines[1]!r}" if len(lines) > 1 else said


def _first_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return re.sub(r"^(LLVM IR parsing error|<string>:|.*?error:)\s*", "", " ".join(lines[:2])) if lines else "no reason"

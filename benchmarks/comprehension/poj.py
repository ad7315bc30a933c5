"""POJ-104: programs that students wrote for 104 exercises, as a folder that `classify` reads.

Caller: `python -m benchmarks code --task classification`. The archive `code/poj104.tar.xz` is other people's and is not
shipped; its index names 500 programs for each class. They come without includes and with every kind of `main`, so that
each `main` gets the type that C++ asks for, and a prelude with the usual headers stands before all.

Source: Mou et al., Convolutional Neural Networks over Tree Structures for Programming Language Processing, AAAI 2016.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from laconic.errors import BadInput
from laconic.storage import files
from laconic_code import archives
from laconic_code.ir import Dialect

_HEADERS = ("cstdio", "cstdlib", "cmath", "cstring", "iostream", "algorithm", "iomanip", "string", "vector", "cctype",
            "climits")  # fmt: skip
_PRELUDE = "".join(f"#include <{name}>\n" for name in _HEADERS) + "using namespace std;\n"
_MAIN = re.compile(r"^[ \t]*(?:(?:void|int)\s+)?main\s*\(", re.MULTILINE)
MOST = 500


def unpack(folder: Path, per_class: int = MOST) -> tuple[Path, Dialect]:
    """Write the first `per_class` programs of each class below `folder`, unless they are there.

    Returns:
        The folder of the classes, and how to compile what is in it.

    Raises:
        BadInput: `per_class` is not in 1 … 500, or the archive is missing.
    """
    if not 1 <= per_class <= MOST:
        raise BadInput(f"a class has 1 to {MOST} programs, got {per_class}")
    root = folder / f"poj104-{per_class}"
    if not root.is_dir():  # written beside and renamed, so that it is whole or not there
        sources, index = archives.members("poj104"), archives.document("poj104", "index_500x104.json")
        partial = folder / f"{root.name}.{os.getpid()}"
        for label, names in index.items():
            place = partial / f"{int(label):03d}"
            place.mkdir(parents=True)
            for name in names[:per_class]:
                (place / Path(name).name).write_text(standard_main(sources[name].decode(errors="replace")))
        partial.rename(root)
    return root, Dialect(files.replace(folder / "poj104.h", _PRELUDE), "gnu++98")


def standard_main(source: str) -> str:
    """A program whose `main` returns int.

    >>> standard_main("void main() { }")
    'int main() { }'
    """
    return _MAIN.sub("int main(", source)

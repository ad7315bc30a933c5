"""HOW IT IS DIVIDED: a model's layers over ranks, with compressed activations between them.

`laconic.divide(model, plan)` is the entry point (`divide.py`); `plan.py` is the division as data, `forms/` are the ways
to divide a layer, `moves.py` the operators between ranks they are made of, `boundary.py` how a tensor crosses.
"""

from __future__ import annotations

from laconic.parallel import forms as _forms  # noqa: F401  (registers every form)
from laconic.parallel.boundary import Boundary, Cut, Traffic
from laconic.parallel.forms.channels import Channels
from laconic.parallel.forms.data import Data
from laconic.parallel.forms.dense import Dense
from laconic.parallel.forms.local import Local
from laconic.parallel.forms.norm import Norm
from laconic.parallel.forms.space import Space
from laconic.parallel.forms.stages import Stages
from laconic.parallel.forms.trick import Trick
from laconic.parallel.plan import Form, Plan, register

__all__ = [
    "Boundary", "Channels", "Cut", "Data", "Dense", "Form", "Local", "Norm", "Plan", "Space", "Stages",
    "Traffic", "Trick", "register",
]  # fmt: skip

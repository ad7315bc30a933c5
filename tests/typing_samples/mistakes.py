"""Mistakes that a type checker must find before anything runs: every line with a mark is one."""

from __future__ import annotations

import torch
from torch import nn

import laconic

model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
laconic.compress(model, "none", algoritm="ring")  # mistake
laconic.compress(model, "none", feedback="yes")  # mistake
laconic.distribute(model, optimizer, codecs="none")  # mistake
laconic.distribute(model, optimizer, message_nbytes="1MB")  # mistake
laconic.elastic(model, optimizer, laconic.Samples(9, 3), "meeting", worker=2)  # mistake
laconic.search(len, "x = float(0, 1)", trails=3)  # mistake
laconic.divide(model, "data", codex="none")  # mistake
laconic.tune(model, None, tolerance=[])  # mistake
laconic.shrink(model, budget="1 %")  # mistake
laconic.init().nothing()  # mistake
print(laconic.no_such_name)  # mistake

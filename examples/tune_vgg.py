"""Compute VGG-16's convolutions by the quickest methods that are near enough, and see what it gives.

python examples/tune_vgg.py          the first two blocks on small images, in seconds
python examples/tune_vgg.py 224      all thirteen layers on images of their proper size, in a minute
"""

import copy
import sys

import torch
from torch import nn

import laconic
from laconic.operators.timing import race

side = int(sys.argv[1]) if len(sys.argv) > 1 else 24
widths = ["64", "64", "pool", "128", "128", "pool", *["256"] * 3, "pool", *["512"] * 3, "pool", *["512"] * 3, "pool"]
layers: list[nn.Module] = []
channels = 3
for width in widths if side >= 224 else widths[:6]:
    if width == "pool":
        layers.append(nn.MaxPool2d(2))
    else:
        layers += [nn.Conv2d(channels, int(width), 3, padding=1), nn.ReLU()]
        channels = int(width)

torch.set_num_threads(1)
torch.manual_seed(0)
native, example = nn.Sequential(*layers).eval(), torch.randn(1, 3, side, side)
tuned = laconic.tune(copy.deepcopy(native), example, policy="undivided")
print(laconic.operators.plan_of(tuned))

with torch.no_grad():
    error = (tuned(example) - native(example)).abs().max() / native(example).abs().max()
    times = race({"native": lambda: native(example), "tuned": lambda: tuned(example)}, turns=9, hopeless=9.0)
print(f"the whole: {times['tuned'].speedup:.2f} times as fast, off by {error:.1e}")
assert error < 1e-5
assert list(laconic.operators.untune(tuned).state_dict()) == list(native.state_dict())

"""LSTM and GRU, one sequence and one step at a time, from the papers' equations, in float64."""

from __future__ import annotations

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(x, h, c, w_ih, w_hh, b_ih, b_hh):
    """x (steps, inputs) -> outputs (steps, hidden) and the last h, c."""
    outputs = []
    for seen in x:
        i, f, g, o = np.split(w_ih @ seen + b_ih + w_hh @ h + b_hh, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        outputs.append(h)
    return np.array(outputs), (h, c)


def gru(x, h, w_ih, w_hh, b_ih, b_hh):
    """x (steps, inputs) -> outputs (steps, hidden) and the last h."""
    outputs = []
    for seen in x:
        r, z, n = np.split(w_ih @ seen + b_ih, 3)
        hr, hz, hn = np.split(w_hh @ h + b_hh, 3)
        r, z = sigmoid(r + hr), sigmoid(z + hz)
        h = (1 - z) * np.tanh(n + r * hn) + z * h
        outputs.append(h)
    return np.array(outputs), (h,)


def least_computations(blocks, memory, inside, state):
    """The recursion of Gruslys et al., written out: blocks computed to go back through `blocks` with `memory`."""
    if blocks == 0:
        return 0
    if memory >= inside * blocks:
        return blocks
    if memory < inside:
        return float("inf")
    best = float("inf")
    for y in range(1, blocks):
        right = least_computations(blocks - y, memory - state, inside, state)
        best = min(best, y + right + least_computations(y, memory, inside, state))
    return best

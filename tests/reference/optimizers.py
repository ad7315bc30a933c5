"""The optimisers made for slow links, straight from their formulas, for any number of workers, without a network.

A codec is a function of (worker or "sum", vector) with a memory of what it left out; here only exact ones are used.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def onebit_adam(x: Array, gradients: list[list[Array]], lr: float, betas: tuple[float, float], eps: float,
                weight_decay: float, freeze_step: int) -> Array:  # fmt: skip
    """`gradients[t][i]` is worker i's at step t; momentum is averaged exactly after `freeze_step`, too."""
    x, m, v = x.astype(np.float64), np.zeros_like(x, np.float64), np.zeros_like(x, np.float64)
    for t, of_workers in enumerate(gradients):
        mean = np.mean(of_workers, axis=0)
        m = betas[0] * m + (1 - betas[0]) * mean  # the mean of β₁m + (1−β₁)gᵢ is the same
        m = np.where((v == 0) & (t >= freeze_step), 0.0, m)
        if t < freeze_step:
            v = betas[1] * v + (1 - betas[1]) * mean**2
        x = x - lr * (m / (np.sqrt(v) + eps) + weight_decay * x)
    return x


def zero_one_adam(x: Array, gradients: list[list[Array]], lr: float, betas: tuple[float, float], eps: float,
                  variance_steps: set[int], agreements: set[int]) -> list[Array]:  # fmt: skip
    """Every worker's weights; `agreements` and `variance_steps` are T_u and T_v."""
    workers = len(gradients[0])
    start, v = x.astype(np.float64), np.zeros_like(x, np.float64)
    m = [np.zeros_like(start) for _ in range(workers)]
    u = [np.zeros_like(start) for _ in range(workers)]
    own, rates = [start.copy() for _ in range(workers)], 0.0
    for t, of_workers in enumerate(gradients):
        if t in variance_steps:
            v = betas[1] * v + (1 - betas[1]) * np.mean(of_workers, axis=0) ** 2
        rates += lr
        for i, g in enumerate(of_workers):
            m[i] = betas[0] * m[i] + (1 - betas[0]) * g
            u[i] = u[i] + lr * m[i]
        if t in agreements:
            mean = np.mean(u, axis=0)
            u = [mean.copy() for _ in range(workers)]
        u = [np.where(v == 0, 0.0, each) for each in u]
        own = [start - u[i] / (np.sqrt(v) + eps) for i in range(workers)]
        if t in agreements:
            m = [u[i] / rates for i in range(workers)]
            u, rates, start = [np.zeros_like(start) for _ in range(workers)], 0.0, own[0]
    return own


def demo(x: Array, gradients: list[list[Array]], lr: float, beta: float, chunk: int, k: int,
         weight_decay: float) -> Array:  # fmt: skip
    """The flat vector's chunks, padded with zeros; of equal components the first is sent."""
    n, workers = x.size, len(gradients[0])
    i = np.arange(chunk)
    basis = np.cos(np.pi * (2 * i[None, :] + 1) * i[:, None] / (2 * chunk)) * np.sqrt(2 / chunk)
    basis[0] /= np.sqrt(2)
    x, m = x.astype(np.float64), [np.zeros(n) for _ in range(workers)]
    for of_workers in gradients:
        total = 0.0
        for i, g in enumerate(of_workers):
            m[i] = beta * m[i] + g
            rows = np.pad(m[i], (0, -n % chunk)).reshape(-1, chunk)
            c = rows @ basis.T
            order = np.argsort(-np.abs(c), axis=1, kind="stable")[:, :k]
            sent = np.zeros_like(c)
            np.put_along_axis(sent, order, np.take_along_axis(c, order, 1), 1)
            m[i] = m[i] - (sent @ basis).reshape(-1)[:n]
            total = total + sent
        x = x - lr * (np.sign((total @ basis).reshape(-1)[:n]) + weight_decay * x)
    return x


def dion(x: Array, q: Array, gradients: list[list[Array]], lr: float, momentum: float) -> Array:
    """One matrix, from a given Q; P is the orthonormal basis that a QR decomposition gives."""
    rows, columns = x.shape
    x, q = x.astype(np.float64), q.astype(np.float64)
    m = [np.zeros((rows, columns)) for _ in gradients[0]]
    for of_workers in gradients:
        b = [m[i] + g for i, g in enumerate(of_workers)]
        p = np.linalg.qr(np.mean([each @ q for each in b], axis=0))[0]
        r = np.mean([each.T @ p for each in b], axis=0)
        m = [each - (1 - momentum) * p @ r.T for each in b]
        q = r / np.linalg.norm(r, axis=0)
        x = x - lr * np.sqrt(rows / columns) * p @ q.T
    return x


def onebit_lamb(x: list[Array], gradients: list[list[list[Array]]], lr: float, betas: tuple[float, float],
                eps: float, weight_decay: float, freeze_step: int) -> list[Array]:  # fmt: skip
    """`gradients[t][i][k]` is worker i's of parameter k at step t; momentum is averaged exactly after `freeze_step`."""
    x = [each.astype(np.float64) for each in x]
    m, v, w = ([np.zeros_like(each) for each in x] for _ in range(3))
    mean_c, r = [0.0] * len(x), [1.0] * len(x)
    for t, of_workers in enumerate(gradients):
        for k in range(len(x)):
            g, old = np.mean([worker[k] for worker in of_workers], axis=0, dtype=np.float64), m[k]
            m[k] = betas[0] * m[k] + (1 - betas[0]) * g
            if t < freeze_step:
                v[k] = w[k] = betas[1] * v[k] + (1 - betas[1]) * g**2
                u = m[k] / (np.sqrt(v[k]) + eps) + weight_decay * x[k]
                lengths = np.linalg.norm(x[k]), np.linalg.norm(u)
                c = min(10.0, max(0.01, lengths[0] / lengths[1])) if min(lengths) > 0 else 1.0
                mean_c[k] = c if t == 0 else 0.9 * mean_c[k] + 0.1 * c
                x[k] = x[k] - lr * c * u
                continue
            made = (m[k] - betas[0] * old) / (1 - betas[0])
            w[k] = betas[1] * w[k] + (1 - betas[1]) * made**2
            step = m[k] / (np.sqrt(v[k]) + eps)
            u = step + weight_decay * x[k]
            new = np.max((np.sqrt(v[k]) + eps) / (np.sqrt(w[k]) + eps))
            if weight_decay > 0:
                p = min(1.0, np.linalg.norm(step) / np.linalg.norm(u))
                new = p * new + 1 - p
            r[k] = min(max(min(max(new, 0.5), 4.0), 0.9 * r[k]), 1.1 * r[k])
            x[k] = x[k] - lr * r[k] * mean_c[k] * u
    return x


def muon_matrix(x: Array, gradients: list[Array], lr: float, momentum: float, weight_decay: float) -> Array:
    """A matrix with Nesterov's momentum and five steps of Newton–Schulz."""
    x, m = x.astype(np.float64), np.zeros(x.shape)
    for g in gradients:
        m = momentum * m + g
        y = g + momentum * m
        y = y / np.linalg.norm(y)
        for _ in range(5):
            y = 3.4445 * y + (-4.7750 * (y @ y.T) + 2.0315 * (y @ y.T) @ (y @ y.T)) @ y
        x = x - lr * (0.2 * np.sqrt(max(x.shape)) * y + weight_decay * x)
    return x


def adamw(x: Array, gradients: list[Array], lr: float, betas: tuple[float, float], eps: float,
          weight_decay: float) -> Array:  # fmt: skip
    x, m, v = x.astype(np.float64), np.zeros(x.shape), np.zeros(x.shape)
    for t, g in enumerate(gradients, 1):
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
        step = (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
        x = x - lr * (step + weight_decay * x)
    return x

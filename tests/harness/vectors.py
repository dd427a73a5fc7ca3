"""Vectors drawn at random, the same ones each time."""

import numpy as np


def random_vectors(rows: int, dims: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.1, 1.0, (rows, dims)).astype(np.float32)

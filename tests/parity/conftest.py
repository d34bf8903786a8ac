"""Other libraries as oracles. Needs the `parity` extra; `make parity` makes an environment that has it."""

import os

# Both libraries compute on the CPU here. Without this, a jax with CUDA takes most of the GPU's memory at its import.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

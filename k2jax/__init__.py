"""k2jax: the training stack of the Kimi K2 report, in JAX and Flax. Start at `k2jax.config` and `k2jax.optim.muonclip`."""

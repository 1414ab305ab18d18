"""The protocols: one algorithm, one file, with its paper and its rule."""

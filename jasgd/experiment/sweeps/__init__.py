"""Many runs in virtual time: grids, sweeps over them, and comparisons."""

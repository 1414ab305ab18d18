"""Entry points: the modules to run with `python -m`, and one script each."""

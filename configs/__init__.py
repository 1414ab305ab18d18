"""One runnable file per experiment; its docstring is the lab note."""

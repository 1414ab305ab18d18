"""The suites of `launch.benchmark`, a module each."""

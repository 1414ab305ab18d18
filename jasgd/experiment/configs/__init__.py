"""Configs of training runs: nested dataclasses, whose fields are flags."""

"""Inspect the machine: its properties, its problems, a self-test, a benchmark, model advice."""

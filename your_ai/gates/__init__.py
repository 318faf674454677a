"""Checks of untrusted input. Each kind of input is checked in one module."""

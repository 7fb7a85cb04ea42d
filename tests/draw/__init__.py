"""Draws programs, and compares two ways to run each of them."""

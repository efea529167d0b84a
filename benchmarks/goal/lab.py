"""Milliseconds of a step in the network lab."""

RATES = ("unshaped", "1gbit", "300mbit", "100mbit")

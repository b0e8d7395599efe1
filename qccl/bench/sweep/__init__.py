"""Measures a collective over a range of sizes, and checks each result."""

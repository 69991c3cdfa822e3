"""Rows and page of the evidence; `benchmarks/papers.py` runs it."""

"""Comparisons: several recipes trained with the same seeds, and what can be said of their differences."""

"""Audit: the gradient signal of credit schemes, kernels and normalisations, measured before anything is trained."""

"""The desk task ``compose``: coloured shapes on a 32x32 canvas in GenEval's six categories."""

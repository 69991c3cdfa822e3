"""The desk task ``compose``: coloured shapes on a 24x24 canvas in GenEval's six categories."""

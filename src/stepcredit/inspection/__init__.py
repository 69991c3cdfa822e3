"""Looking inside trajectories: one prompt's group as a set of weights draws it, and its credit under every scheme."""

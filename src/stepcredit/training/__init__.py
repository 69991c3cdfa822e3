"""From a recipe to trained weights: everything around the numerical core."""

"""Compare a model with the larger model that `grow` made from it: heads, neurons and circuits."""

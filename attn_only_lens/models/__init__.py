"""The kinds of models with neuron-heads, and what is done to a whole model."""

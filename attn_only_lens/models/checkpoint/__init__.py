"""Save models with neuron-heads to folders, and load them."""

"""Run models on prompts: record activations, and compute metrics, gradients and partial runs."""

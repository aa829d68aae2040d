"""Run models on prompts, record activations, and compute metrics and gradients."""

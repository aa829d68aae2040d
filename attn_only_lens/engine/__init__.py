"""Run models: prompts, metrics, sites, recordings, gradients, and replays of a forward pass."""

"""Tools to run models: prompts, metrics, sites, recordings, gradients, partial forward passes."""

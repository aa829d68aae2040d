"""Forward passes: prompts, metrics, sites, recordings, gradients, and replays of a part of one."""

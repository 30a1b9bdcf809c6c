"""Language models: a generated language and its prompts, and the Pythia checkpoints, looked into by the same probes."""
